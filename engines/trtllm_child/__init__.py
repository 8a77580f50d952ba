"""What runs inside TensorRT-LLM's own environment, in a process of its own.

The package pins other numpy, torch and transformers versions than the service wants, loads CUDA when it is
imported, and can crash as a whole. So it lives in a child process with its own interpreter; this package is
all of the project that is imported there. Standard library, `engines.types` and `engines.executor` only;
tensorrt_llm inside functions.
"""
