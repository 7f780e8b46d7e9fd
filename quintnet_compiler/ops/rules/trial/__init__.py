"""Rules of operators by trial: an operator runs on parts of its inputs, and what comes out is compared."""
