"""One seeded simulator of a device, a link and a companion, for benches, tests and `isthmus audit`."""
