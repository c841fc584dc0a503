"""The `specache::` ops: their schemas, shapes and PyTorch implementations. Importing this registers them."""

# With the repository's root on sys.path, transformers imports this folder as the Hub's `kernels`. The ops must not be
# registered twice.
if __name__ == "specache_compile.kernels":
    from . import ops as ops
