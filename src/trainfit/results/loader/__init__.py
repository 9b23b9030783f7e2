"""What is known of a DataLoader: settings, measured costs, advice, a rehearsal."""
