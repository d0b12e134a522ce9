"""Where readings go: console, TensorBoard, JSONL, webhook."""
