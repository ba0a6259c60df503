//! Positions in PostgreSQL's write-ahead log.

use std::fmt;
use std::str::FromStr;

/// A log sequence number: a byte position in the write-ahead log. Zero means "none".
///
/// Printed and parsed as PostgreSQL prints it: two hexadecimal numbers, `16/B374D848`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// PostgreSQL's `InvalidXLogRecPtr`: no position.
    pub const ZERO: Self = Self(0);
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not of the form `16/B374D848`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not a log position: {0:?} (expected two hexadecimal numbers, such as 16/B374D848)")]
pub struct ParseLsnError(String);

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let half = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
            plain.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
        };
        text.split_once('/')
            .and_then(|(high, low)| Some((half(high)?, half(low)?)))
            .map(|(high, low)| Self(u64::from(high) << 32 | u64::from(low)))
            .ok_or_else(|| ParseLsnError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_and_parses_as_postgresql_does() {
        let lsn = Lsn(0x16_B374_D848);
        assert_eq!(lsn.to_string(), "16/B374D848");
        assert_eq!("16/B374D848".parse(), Ok(lsn));
        assert_eq!("0/0".parse(), Ok(Lsn::ZERO));
    }

    #[test]
    fn refuses_what_is_not_a_position() {
        for text in ["", "/", "1", "1/", "/1", "+1/2", "1/ 2", "123456789/0", "g/0", "1/2/3"] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?}");
        }
    }
}
