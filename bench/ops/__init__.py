"""One file an op; each defines `ENTRY`. A new file is found by itself."""
