"""What `make gpu` runs on a machine with a GPU: `run.py` plans, `stage.py` runs one stage."""
