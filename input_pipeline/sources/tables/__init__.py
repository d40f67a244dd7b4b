"""Sources of tables: CSV and Parquet files."""
