//! Messages of PostgreSQL's protocol on the replication connection: bytes in, frames out.
//!
//! Source: PostgreSQL documentation, "Frontend/Backend Protocol", "Message Formats": a tag byte, then a length that
//! counts itself, then the body.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Read at a time. Events share the chunk that they were read into until they are sent, so a chunk is small beside
/// the window of events in flight, and large beside a row; where most of it is not ours, `changes.rs` copies the row out
/// of it. Chunks from 64 KiB on make the C library's allocator tidy up all of its memory whenever one is freed.
const CHUNK_BYTES: usize = 48 * 1024;
/// With less room than this a new chunk is begun.
const LEAST_ROOM: usize = 8 * 1024;
/// Kept of a message that is larger than the cap: enough for the columns that say which row it was.
const PREFIX_BYTES: usize = 64 * 1024;

/// One message from the server.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub tag: u8,
    pub body: Bytes,
    /// The body's length as the server sent it; more than `body` holds when the message was over the cap.
    pub length: usize,
}

impl Frame {
    /// Whether the body was cut because the message was over the cap.
    pub fn is_cut(&self) -> bool {
        self.body.len() < self.length
    }
}

/// The receiving half of a connection.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    buffer: BytesMut,
    /// Bytes of a body beyond which only its prefix is kept.
    cap: usize,
    /// Bytes of a cut message that are still to come and to be thrown away.
    skip: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// `buffered` was read from the stream already; bodies over `cap` bytes are cut.
    pub fn new(stream: R, buffered: BytesMut, cap: usize) -> Self {
        Self { stream, buffer: buffered, cap: cap.max(PREFIX_BYTES), skip: 0 }
    }

    /// The next message, if it has arrived. An error means that the peer does not speak the protocol.
    pub fn take(&mut self) -> io::Result<Option<Frame>> {
        if self.skip > 0 {
            let gone = self.skip.min(self.buffer.len());
            self.buffer.advance(gone);
            self.skip -= gone;
            if self.skip > 0 {
                return Ok(None);
            }
        }
        let mut header = self.buffer.as_ref();
        if header.remaining() < 5 {
            return Ok(None);
        }
        let tag = header.get_u8();
        let Some(length) = usize::try_from(header.get_i32()).ok().and_then(|length| length.checked_sub(4)) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("message {tag:#04x} with a bad length")));
        };
        let keep = if length > self.cap { PREFIX_BYTES } else { length };
        if header.remaining() < keep {
            return Ok(None);
        }
        self.buffer.advance(5);
        let body = self.buffer.split_to(keep).freeze();
        self.skip = length - keep;
        Ok(Some(Frame { tag, body, length }))
    }

    /// Reads what the server has sent; returns the number of bytes, zero at the end of the stream. Cancel-safe.
    pub async fn fill(&mut self) -> io::Result<usize> {
        // Not for every read: room for another chunk is found only by leaving the present one, however little it holds.
        if self.buffer.capacity() - self.buffer.len() < LEAST_ROOM {
            self.buffer.reserve(CHUNK_BYTES);
        }
        self.stream.read_buf(&mut self.buffer).await
    }

    /// The next message, waiting for it. Cancel-safe.
    pub async fn read(&mut self) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.take()? {
                return Ok(frame);
            }
            if self.fill().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// The sending half of a connection.
#[derive(Debug)]
pub struct FrameWriter<W> {
    stream: W,
    buffer: BytesMut,
    unflushed: bool,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    pub fn new(stream: W) -> Self {
        Self { stream, buffer: BytesMut::new(), unflushed: false }
    }

    /// Where messages to send are appended.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Whether something waits to be sent.
    pub fn is_pending(&self) -> bool {
        self.unflushed || !self.buffer.is_empty()
    }

    /// Sends what waits. Cancel-safe: what was not sent yet still waits.
    pub async fn flush(&mut self) -> io::Result<()> {
        while !self.buffer.is_empty() {
            self.unflushed = true;
            if self.stream.write_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        self.stream.flush().await?;
        self.unflushed = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = i32::try_from(body.len() + 4).unwrap();
        [&[tag][..], &length.to_be_bytes(), body].concat()
    }

    /// Feeds `bytes` in pieces of `step` and collects the frames.
    async fn frames(bytes: &[u8], step: usize, cap: usize) -> io::Result<Vec<Frame>> {
        let (mut ours, theirs) = tokio::io::duplex(step);
        let bytes = bytes.to_vec();
        let feed = tokio::spawn(async move { ours.write_all(&bytes).await });
        let mut reader = FrameReader::new(theirs, BytesMut::new(), cap);
        let mut all = Vec::new();
        loop {
            match reader.read().await {
                Ok(frame) => all.push(frame),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
        }
        feed.await.unwrap()?;
        Ok(all)
    }

    #[tokio::test]
    async fn messages_come_out_whole_however_they_arrive() {
        let bytes = [message(b'd', b"one"), message(b'Z', b""), message(b'd', &[7; 300])].concat();
        for step in [1, 2, 3, 7, 64, 4096] {
            let all = frames(&bytes, step, usize::MAX).await.unwrap();
            let lengths: Vec<_> = all.iter().map(|frame| (frame.tag, frame.body.len())).collect();
            assert_eq!(lengths, [(b'd', 3), (b'Z', 0), (b'd', 300)]);
        }
    }

    #[tokio::test]
    async fn a_message_over_the_cap_is_cut_and_the_next_one_is_whole() {
        let big = vec![1; PREFIX_BYTES * 3];
        let bytes = [message(b'd', &big), message(b'd', b"next")].concat();
        let all = frames(&bytes, 1000, PREFIX_BYTES).await.unwrap();
        assert_eq!((all[0].body.len(), all[0].length, all[0].is_cut()), (PREFIX_BYTES, big.len(), true));
        assert_eq!((all[1].body.as_ref(), all[1].is_cut()), (&b"next"[..], false));
    }

    #[tokio::test]
    async fn a_length_that_cannot_be_is_an_error() {
        for length in [-1_i32, 0, 3, i32::MIN] {
            let bytes = [&[b'd'][..], &length.to_be_bytes()].concat();
            assert_eq!(frames(&bytes, 64, 1000).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
