# What people run here. `make` alone lists it.

# Optimised, but built in a fraction of the time of a release; see [profile.quick] in Cargo.toml.
PROFILE ?= quick

.PHONY: help demo test soak bench lint servers
.DEFAULT_GOAL := help

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Bring up PostgreSQL and NATS, relay a shop's orders, watch them arrive
	@deploy/dev/fetch
	cargo build --locked --profile $(PROFILE)
	deploy/dev/with-servers $${CARGO_TARGET_DIR:-target}/$(PROFILE)/outbox-relay demo

test: servers ## Run every test, against PostgreSQL 15 to 18 and NATS 2.10 to 2.15
	cargo test --locked

soak: servers ## Many faults at random under load; SOAK_ROUNDS=100, SOAK_SEED replays a run
	cargo test --locked --test soak -- --nocapture

bench: ## Measure the pure stages; see benches/README.md
	cargo bench --locked

lint: ## Check the format, clippy, and (where installed) cargo-deny and shellcheck
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	@if command -v cargo-deny >/dev/null; then set -x; cargo deny --offline check bans licenses sources; \
	  else echo "cargo-deny is not installed: licenses and duplicates are not checked"; fi
	@if command -v shellcheck >/dev/null; then set -x; shellcheck deploy/dev/fetch deploy/dev/with-servers .ci/run; \
	  else echo "shellcheck is not installed: the scripts are not checked"; fi

servers: ## Fetch the servers that the tests need (into .servers/, nothing is installed)
	@deploy/dev/fetch all
