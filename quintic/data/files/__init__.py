"""From files to documents: folders, compression, text, JSON, CSV and Parquet."""
