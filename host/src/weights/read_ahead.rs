//! Files read in the order of loading, ahead of it, by several threads.
//!
//! Weights are used where their files are mapped. A page that is not in memory is read when it is touched, alone or
//! with a few neighbours, which keeps no disk busy; so threads read the files before, in large pieces, many at a time.
//! What they read is thrown away: it is in the system's cache then, where the mapping finds it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Bytes that are read ahead of what has been used.
const AHEAD: u64 = 4 << 30;
/// Bytes of a read.
const PIECE: u64 = 4 << 20;
/// Threads that read; most of the time they wait for the disk.
const READERS: usize = 8;
/// Between two looks at how much has been used.
const PAUSE: Duration = Duration::from_millis(1);

/// A part of a file.
pub(super) struct Span<'a> {
    pub file: &'a File,
    pub bytes: Range<u64>,
}

/// A read, and the bytes of all reads before it.
struct Read<'a> {
    file: &'a File,
    at: u64,
    bytes: u64,
    before: u64,
}

/// Runs `load`, which adds to `used` the bytes of spans that it has used, while they are read in order.
pub(super) fn during<T>(spans: &[Span], used: &AtomicU64, load: impl FnOnce() -> T) -> T {
    let reads = reads(spans);
    let (next, ended, from) = (AtomicUsize::new(0), AtomicBool::new(false), used.load(Ordering::Relaxed));
    let read = || {
        let mut buffer = vec![0; PIECE as usize];
        while let Some(read) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
            while read.before > used.load(Ordering::Relaxed) - from + AHEAD && !ended.load(Ordering::Acquire) {
                std::thread::sleep(PAUSE);
            }
            if ended.load(Ordering::Acquire) {
                return;
            }
            // Where this fails, the mapping says so.
            let _ = read.file.read_exact_at(&mut buffer[..read.bytes as usize], read.at);
        }
    };
    std::thread::scope(|scope| {
        (0..READERS.min(reads.len())).for_each(|_| drop(scope.spawn(read)));
        let _end = End(&ended);
        load()
    })
}

/// Spans in pieces; neighbours in a file are taken together.
fn reads<'a>(spans: &[Span<'a>]) -> Vec<Read<'a>> {
    let mut reads: Vec<Read> = Vec::new();
    let mut before = 0;
    for Span { file, bytes } in spans {
        let mut at = bytes.start;
        while at < bytes.end {
            let last = reads.last_mut().filter(|r| std::ptr::eq(r.file, *file) && r.at + r.bytes == at);
            let take = match last {
                Some(last) if last.bytes < PIECE => {
                    let take = (PIECE - last.bytes).min(bytes.end - at);
                    last.bytes += take;
                    take
                }
                _ => {
                    let take = PIECE.min(bytes.end - at);
                    reads.push(Read { file, at, bytes: take, before });
                    take
                }
            };
            (at, before) = (at + take, before + take);
        }
    }
    reads
}

/// Says so when loading has ended, however it did.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_go_together_and_long_spans_in_pieces() {
        let [a, b] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let span = |file, bytes| Span { file, bytes };
        let spans =
            [span(&a, 8..100), span(&a, 100..2 * PIECE + 50), span(&b, 0..7), span(&a, 0..8), span(&b, 7..7 + PIECE)];
        let found: Vec<_> = reads(&spans).iter().map(|r| (std::ptr::eq(r.file, &a), r.at, r.bytes, r.before)).collect();
        let whole = 2 * PIECE + 42;
        assert_eq!(
            found,
            [
                (true, 8, PIECE, 0),
                (true, PIECE + 8, PIECE, PIECE),
                (true, 2 * PIECE + 8, 42, 2 * PIECE),
                (false, 0, 7, whole),
                (true, 0, 8, whole + 7),
                (false, 7, PIECE, whole + 15),
            ]
        );
    }

    #[test]
    fn what_is_loaded_comes_back_and_readers_end_with_it() {
        let file = tempfile::tempfile().unwrap();
        // Far more than may be read ahead of nothing used; and the file is empty.
        let spans = [Span { file: &file, bytes: 0..4 * AHEAD }];
        assert_eq!(during(&spans, &AtomicU64::new(9), || 5), 5);
        assert_eq!(during(&[], &AtomicU64::new(0), || 6), 6);
    }
}
