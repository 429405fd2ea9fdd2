# The commands of the project; README.md tells what each shows. Everything else is plain cargo.

.PHONY: demo test soak bench check deny setup image clean

setup:
	@scripts/setup

# The guest program, and the image made of it that tests, demo and benches boot; quick when both are there.
image:
	@scripts/setup run
	@scripts/build-test-image

# The main job end to end: `mvm dev up`, then two nodes, of which one dies. Cleans up after itself.
demo: image
	@scripts/demo

# Every test. Those that need root, programs or hardware say so when they can't run, and fail where CI is set.
test: setup image
	@scripts/build-cgroup-guest
	cargo nextest run --workspace --no-fail-fast

# The same races and cycles as in the tests, many times over: hours on two cores, for before a release.
soak: setup image
	MVM_CYCLES=10000 MVM_SWAPPER_TRIES=100000 cargo nextest run --workspace --profile soak \
	    -E '(package(mvm-agent) & test(/^network::/)) | (package(mvm-host) & (test(/^links::cycles::/) | test(/^files::/)))'
	MVM_FLOOD_MIB=10240 cargo nextest run --package mvm-tests --profile soak -E 'test(/^tunnel::output_without_end/)'

# Figures as ratios against a peer in the same run; also written to target/bench/results.json.
bench: image
	@scripts/setup --bench
	cargo build --release --workspace --bins
	target/release/mvm-benches

# What CI checks besides the tests.
check:
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

# Bans, licences and sources (needs: cargo install --locked cargo-deny). tests/tidy.rs holds the same list without it.
deny:
	cargo deny check bans licenses sources

clean:
	cargo clean
