"""Training state on disk: any layout reads what any layout wrote."""
