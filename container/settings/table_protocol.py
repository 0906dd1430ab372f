"""Variables of what the protocols have besides: who may use what, headers that models see, gRPC's connections, metrics.

Rows of the table in `table`. Most of their flags are tritonserver's.
"""

from __future__ import annotations

from container.settings import protocol_values as p
from container.settings import values as v
from container.settings.kinds import GrpcCompression, ours

PROTOCOL_VARIABLES = (
    ours("MME_SERVER_ID", v.printable(255), "What the server calls itself in its metadata."),
    ours(
        "MME_ALLOWED_HOSTS",
        p.hosts,
        "Hosts besides localhost that a server on loopback answers to, and whose pages may change something; "
        "*.example.com is all below it (comma-separated; the flag may be repeated).",
        default="none",
    ),
    ours(
        "MME_TLS_CERT",
        v.file,
        "Serve HTTP, metrics and gRPC by TLS alone, with this certificate and those in between, in PEM; files of TLS "
        "are read again when they change.",
        default="none",
    ),
    ours("MME_TLS_KEY", v.file, "Its private key, in PEM.", default="none"),
    ours(
        "MME_TLS_CLIENT_CA",
        v.file,
        "Have each client show a certificate that one of these, in PEM, vouches for.",
        default="none",
    ),
    ours(
        "MME_KEY_FILE",
        v.file,
        "Have each client send a key, over HTTP and gRPC; the file has a line for each, as `mme key` prints it, and is "
        "read again when it changes.",
        default="none",
    ),
    ours(
        "MME_HTTP_RESTRICTED_API",
        p.restrictions,
        "Parts of the API for those alone who send a header, CATEGORY,CATEGORY:HEADER=VALUE (may be repeated).",
        default="none",
        field="http_restrictions",
    ),
    ours(
        "MME_GRPC_RESTRICTED_PROTOCOL",
        p.restrictions,
        "The same over gRPC, where metadata are called triton-grpc-protocol-HEADER.",
        default="none",
        field="grpc_restrictions",
    ),
    ours(
        "MME_HTTP_HEADER_FORWARD_PATTERN",
        p.header_pattern,
        "Hand headers whose names match to models, as parameters of the request.",
        default="none",
        field="http_header_pattern",
    ),
    ours(
        "MME_GRPC_HEADER_FORWARD_PATTERN",
        p.header_pattern,
        "The same of gRPC's metadata.",
        default="none",
        field="grpc_header_pattern",
    ),
    ours(
        "MME_GRPC_KEEPALIVE",
        p.keepalive,
        "gRPC's pings and how old its connections may grow, as time=7200000,timeout=20000 (the flag may be repeated).",
        default="gRPC's own",
    ),
    ours(
        "MME_GRPC_USE_SSL",
        v.boolean,
        "Serve gRPC by TLS alone, with the certificate and the key below.",
        default="true with MME_TLS_CERT, else false",
    ),
    ours(
        "MME_GRPC_USE_SSL_MUTUAL",
        v.boolean,
        "The same, and have each client show a certificate that MME_GRPC_ROOT_CERT vouches for.",
    ),
    ours(
        "MME_GRPC_SERVER_CERT",
        v.file,
        "Certificate of gRPC's server, and of those in between, in PEM.",
        default="that of MME_TLS_CERT",
    ),
    ours("MME_GRPC_SERVER_KEY", v.file, "Its private key, in PEM.", default="that of MME_TLS_KEY"),
    ours(
        "MME_GRPC_ROOT_CERT",
        v.file,
        "Certificates in PEM of who vouches for clients.",
        default="those of MME_TLS_CLIENT_CA",
    ),
    ours(
        "MME_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL",
        v.enum_of(GrpcCompression),
        "How much answers over gRPC are compressed, by what the client can read: gzip for low, deflate above.",
        field="grpc_compression",
    ),
    ours("MME_GRPC_ADDRESS", v.host, "Address to listen on for gRPC.", default="that of MME_HOST"),
    ours(
        "MME_METRICS_ADDRESS", v.host, "Address to listen on at the port for metrics alone.", default="that of MME_HOST"
    ),
    ours(
        "MME_METRICS_PORT",
        v.integer(0, 65535),
        "Port that answers /metrics alone, which the main port does too; 0 takes a free one and logs it.",
        default="none",
    ),
    ours(
        "MME_METRICS_CONFIG",
        p.latencies,
        "Which latencies are among the metrics, as summary_latencies=true (the flag may be repeated).",
        default="counter_latencies=true",
        field="latencies",
    ),
)
