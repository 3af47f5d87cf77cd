"""The operators of a pipeline, one a file. Each works on blocks of columns (`zephon.columns.Block`)."""
