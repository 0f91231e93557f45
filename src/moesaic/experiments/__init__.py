"""The paper's tables and figures, a file each. `contents` lists them."""
