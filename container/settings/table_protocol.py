"""Variables of what the protocols have besides: who may use what, headers that models see, gRPC's connections, metrics.

Rows of the table in `table`. Most of their flags are tritonserver's.
"""

from __future__ import annotations

from container.settings import protocol_values as p
from container.settings import values as v
from container.settings.kinds import GrpcCompression, Variable

PROTOCOL_VARIABLES = (
    Variable(
        "MME_SERVER_ID", "server_id", v.printable(255), "What the server calls itself in its metadata.", "--server-id"
    ),
    Variable(
        "MME_HTTP_RESTRICTED_API",
        "http_restrictions",
        p.restrictions,
        "Parts of the API for those alone who send a header, CATEGORY,CATEGORY:HEADER=VALUE (may be repeated).",
        "--http-restricted-api",
        "none",
    ),
    Variable(
        "MME_GRPC_RESTRICTED_PROTOCOL",
        "grpc_restrictions",
        p.restrictions,
        "The same over gRPC, where metadata are called triton-grpc-protocol-HEADER.",
        "--grpc-restricted-protocol",
        "none",
    ),
    Variable(
        "MME_HTTP_HEADER_FORWARD_PATTERN",
        "http_header_pattern",
        p.header_pattern,
        "Hand headers whose names match to models, as parameters of the request.",
        "--http-header-forward-pattern",
        "none",
    ),
    Variable(
        "MME_GRPC_HEADER_FORWARD_PATTERN",
        "grpc_header_pattern",
        p.header_pattern,
        "The same of gRPC's metadata.",
        "--grpc-header-forward-pattern",
        "none",
    ),
    Variable(
        "MME_GRPC_KEEPALIVE",
        "grpc_keepalive",
        p.keepalive,
        "gRPC's pings and how old its connections may grow, as time=7200000,timeout=20000 (the flag may be repeated).",
        "--grpc-keepalive",
        "gRPC's own",
    ),
    Variable(
        "MME_GRPC_USE_SSL",
        "grpc_use_ssl",
        v.boolean,
        "Serve gRPC by TLS alone, with the certificate and the key below.",
        "--grpc-use-ssl",
    ),
    Variable(
        "MME_GRPC_USE_SSL_MUTUAL",
        "grpc_use_ssl_mutual",
        v.boolean,
        "The same, and have each client show a certificate that MME_GRPC_ROOT_CERT vouches for.",
        "--grpc-use-ssl-mutual",
    ),
    Variable(
        "MME_GRPC_SERVER_CERT",
        "grpc_server_cert",
        v.file,
        "Certificate of gRPC's server, and of those in between, in PEM.",
        "--grpc-server-cert",
        "none",
    ),
    Variable("MME_GRPC_SERVER_KEY", "grpc_server_key", v.file, "Its private key, in PEM.", "--grpc-server-key", "none"),
    Variable(
        "MME_GRPC_ROOT_CERT",
        "grpc_root_cert",
        v.file,
        "Certificates in PEM of who vouches for clients.",
        "--grpc-root-cert",
        "none",
    ),
    Variable(
        "MME_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL",
        "grpc_compression",
        v.enum_of(GrpcCompression),
        "How much answers over gRPC are compressed, by what the client can read: gzip for low, deflate above.",
        "--grpc-infer-response-compression-level",
    ),
    Variable(
        "MME_GRPC_ADDRESS",
        "grpc_address",
        v.host,
        "Address to listen on for gRPC.",
        "--grpc-address",
        "that of MME_HOST",
    ),
    Variable(
        "MME_METRICS_ADDRESS",
        "metrics_address",
        v.host,
        "Address to listen on at the port for metrics alone.",
        "--metrics-address",
        "that of MME_HOST",
    ),
    Variable(
        "MME_METRICS_PORT",
        "metrics_port",
        v.integer(0, 65535),
        "Port that answers /metrics alone, which the main port does too; 0 takes a free one and logs it.",
        "--metrics-port",
        "none",
    ),
    Variable(
        "MME_METRICS_CONFIG",
        "latencies",
        p.latencies,
        "Which latencies are among the metrics, as summary_latencies=true (the flag may be repeated).",
        "--metrics-config",
        "counter_latencies=true",
    ),
)
