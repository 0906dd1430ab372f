"""config.pbtxt: its text, the published message that it is parsed into, and what is wrong with it.

The one part of a model's configuration that needs protobuf; `model_handlers.config` has the values that come of it.
"""

from model_handlers.pbtxt.text import config_message, config_of, config_text, parse_config

__all__ = ["config_message", "config_of", "config_text", "parse_config"]
