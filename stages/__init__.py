"""The programs: extract, train, evaluate. Each is one page that tells its story."""
