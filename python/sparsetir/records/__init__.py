"""Records of tuning: what was found for a problem on a machine, kept in one file."""
