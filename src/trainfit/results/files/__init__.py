"""Result files: documents, decoding, errors, the words that results share."""
