# What people run here. `make` alone lists it.

# Optimised, but built in a fraction of the time of a release; see [profile.quick] in Cargo.toml.
PROFILE ?= quick

# Where `make install` puts things; DESTDIR before it is for packages.
PREFIX ?= /usr/local
SHARE = $(DESTDIR)$(PREFIX)/share

.PHONY: help demo test soak bench lint servers deploy-check install
.DEFAULT_GOAL := help

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Bring up PostgreSQL and NATS, relay a shop's orders, watch them arrive
	@deploy/dev/fetch
	cargo build --locked --profile $(PROFILE)
	deploy/dev/with-servers $${CARGO_TARGET_DIR:-target}/$(PROFILE)/outbox-relay demo

# Most tests wait more than they compute.
test: export RUST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))
test: servers ## Run every test: PostgreSQL 15 and 18 (TLS: 15 and 17), nats-server 2.10 and 2.15
	cargo test --locked

soak: servers ## Many faults at random under load; SOAK_ROUNDS=100, SOAK_SEED replays a run
	cargo test --locked --test soak -- --nocapture

bench: ## Measure the relay end to end, beside pg_recvlogical; see benches/README.md
	@deploy/dev/fetch
	cargo bench --locked --bench end_to_end

lint: ## Check the format, clippy, and (where installed) cargo-deny and shellcheck
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	@if command -v cargo-deny >/dev/null; then set -x; cargo deny --offline check bans licenses sources; \
	  else echo "cargo-deny is not installed: licenses and duplicates are not checked"; fi
	@if command -v shellcheck >/dev/null; then set -x; xargs shellcheck <deploy/checks/scripts; \
	  else echo "shellcheck is not installed: the scripts are not checked"; fi

servers: ## Fetch the servers that the tests need (into .servers/, nothing is installed)
	@deploy/dev/fetch all

deploy-check: ## Check the files of deploy/ by the tools that their users have (see deploy/check --help)
	cargo build --locked --profile $(PROFILE)
	OUTBOX_RELAY=$${CARGO_TARGET_DIR:-target}/$(PROFILE)/outbox-relay deploy/check

install: ## Install the program, its manual, completions and systemd unit; PREFIX=/usr/local, DESTDIR=
	cargo build --locked --release
	install -D $${CARGO_TARGET_DIR:-target}/release/outbox-relay $(DESTDIR)$(PREFIX)/bin/outbox-relay
	install -d $(SHARE)/man/man1 $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions \
	  $(SHARE)/fish/vendor_completions.d $(DESTDIR)$(PREFIX)/lib/systemd/system
	$(DESTDIR)$(PREFIX)/bin/outbox-relay man --directory $(SHARE)/man/man1
	$(DESTDIR)$(PREFIX)/bin/outbox-relay completions bash >$(SHARE)/bash-completion/completions/outbox-relay
	$(DESTDIR)$(PREFIX)/bin/outbox-relay completions zsh >$(SHARE)/zsh/site-functions/_outbox-relay
	$(DESTDIR)$(PREFIX)/bin/outbox-relay completions fish >$(SHARE)/fish/vendor_completions.d/outbox-relay.fish
	sed 's|/usr/bin/|$(PREFIX)/bin/|' deploy/systemd/outbox-relay.service \
	  >$(DESTDIR)$(PREFIX)/lib/systemd/system/outbox-relay.service
