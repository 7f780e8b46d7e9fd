"""Where the data of a run stands, and what random numbers are drawn from: saved, and restored."""
