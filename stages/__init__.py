"""The programs, each a page that tells its story: extract, train, evaluate, inspect, verify."""
