"""What a batch's time is spent in: reading, decoding, transforms, collation, storage."""
