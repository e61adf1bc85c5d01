# What CI runs is `just ci`; every recipe can be run by itself.

set shell := ["bash", "-euo", "pipefail", "-c"]

# Everything, in the order in which it fails soonest.
ci: fmt lint proto model test demo grpc kernels

# The code is formatted.
fmt:
    cargo fmt --all --check

# No warnings, in the code and in the tests.
lint:
    cargo clippy --workspace --all-targets --locked -- -D warnings

# The contract is documented and named as buf's standard says.
proto:
    cd proto && buf lint

# The model of examples/tp-embed, without which its tests say "skipped".
model:
    examples/tp-embed/fetch-model

# The README's second command.
test:
    cargo test --workspace

# The README's first command.
demo:
    cargo run --release -- demo

# Stock grpcurl and buf curl against a running daemon: lists, describes and calls every method.
grpc: demo
    tests/grpc-cli/run target/release/allreduced "$(command -v grpcurl)" "$(command -v buf)"

# The CUDA kernels: compiled for every architecture by nvcc and by NVRTC, into the crate by its build script, and run
# without a GPU.
kernels:
    kernels/cuda/build-all --install .ci/cache/nvcc
    NVCC="$PWD/$(kernels/cuda/install-nvcc .ci/cache/nvcc)" ALLREDUCED_CUDA_ARCHS=80 \
        cargo test -p allreduce-contract --features kernels --target-dir target/nvcc kernel:: -- --nocapture
    kernels/cuda/sim/run

# What tests/gpu/run needs, for a machine with a GPU and no cargo, into gpu-bundle/.
gpu-bundle *arguments:
    tests/gpu/bundle {{arguments}}

# The figures of docs/benchmarks.md.
bench:
    cargo run --release -- bench

# Licences, bans and sources of dependencies (needs cargo-deny; advisories need the network).
deny:
    cargo deny check bans licenses sources
