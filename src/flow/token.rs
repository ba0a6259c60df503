//! Maps by token: the numbers that events under way are known by.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by token.
pub type TokenMap<V> = HashMap<u64, V, BuildHasherDefault<TokenHasher>>;

/// Tokens are the relay's own numbers, given out one after the other: nobody can choose them so that they collide.
#[derive(Debug, Default)]
pub struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, token: u64) {
        // The golden ratio spreads neighbours over the whole width.
        self.0 = (self.0 ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
