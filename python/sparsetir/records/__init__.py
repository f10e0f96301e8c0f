"""Records of tuning: the best configs of problems on machines, kept in one file."""
