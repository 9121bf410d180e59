"""Trainings on two hosts, one of which namespaces emulate; run by `make test-hosts`."""
