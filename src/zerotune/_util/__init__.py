"""Small helpers that every layer may use; above ``errors``, below everything else."""
