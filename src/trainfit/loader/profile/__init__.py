"""Profile of a batch's time: reading, decoding, transforms, collation, storage."""
