"""`mme build-engine`: from an ONNX model to an engine of TensorRT."""
