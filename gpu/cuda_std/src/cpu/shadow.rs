//! The last accesses to each byte of a block's shared memory, and what the next one must not do.

use super::FaultKind;
use super::block::Thread;
use super::order::{Accesses, MANY, Now, Write, is_copy};

/// Bytes that are mostly accessed together.
const WORD: usize = 4;

/// The last accesses to one byte, or to a word of bytes that are all alike.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Shadow {
    write: Write,
    read: Accesses,
    atomic: Accesses,
    /// 1 + the thread whose asynchronous copy to this byte is on its way.
    pub pending: u16,
    /// Of a word whose bytes differ: 1 + where they are.
    bytes: u32,
}

/// The words for what others did.
const WROTE: &str = "wrote";
const READ: &str = "read";
const UPDATED: &str = "updated";

impl Shadow {
    pub fn reads(&mut self, me: &Thread, now: Now, addr: u32) {
        self.written(me, addr, "reads");
        not_racing(me, addr, "reads", [(self.write.race(now), WROTE), (self.atomic.race(now), UPDATED)]);
        self.read.add(now);
    }

    pub fn writes(&mut self, me: &Thread, now: Now, addr: u32, pending_mark: u16) {
        self.landed(me, addr);
        let others = [(self.write.race(now), WROTE), (self.read.race(now), READ), (self.atomic.race(now), UPDATED)];
        not_racing(me, addr, "writes", others);
        (self.write, self.pending) = (Write::by(now), pending_mark);
    }

    pub fn updates(&mut self, me: &Thread, now: Now, addr: u32) {
        self.written(me, addr, "updates");
        not_racing(me, addr, "updates", [(self.write.race(now), WROTE), (self.read.race(now), READ)]);
        self.atomic.add(now);
    }

    /// A copy has brought it.
    pub fn land(&mut self, by: Write) {
        (self.write, self.pending) = (by, 0);
    }

    /// Written, and no copy on its way.
    fn written(&self, me: &Thread, addr: u32, does: &str) {
        self.landed(me, addr);
        if self.write.is_none() {
            me.fault(FaultKind::Uninitialised, format!("{does} shared byte {addr}, which nothing has written"));
        }
    }

    #[inline(always)]
    fn landed(&self, me: &Thread, addr: u32) {
        if self.pending != 0 {
            pending(me, addr, self.pending - 1);
        }
    }
}

/// The shadows of all bytes that were touched: one a word, and one a byte where those of a word differ.
#[derive(Default)]
pub(super) struct Shadows {
    words: Vec<Shadow>,
    bytes: Vec<[Shadow; WORD]>,
    /// Of `bytes`, those of words whose bytes are alike again.
    free: Vec<u32>,
}

impl Shadows {
    pub fn clear(&mut self) {
        self.words.clear();
        self.bytes.clear();
        self.free.clear();
    }

    /// Visits the shadows of `count` bytes from `first` on, of bytes that are alike once; `used` bytes may be touched
    /// at all.
    pub fn visit(&mut self, first: usize, count: usize, used: usize, mut visit: impl FnMut(&mut Shadow)) {
        let end = first + count;
        if self.words.len() * WORD < end {
            self.words.resize(end.max(used).div_ceil(WORD), Shadow::default());
        }
        let mut at = first;
        while at < end {
            let word = at / WORD;
            let (from, to) = (at % WORD, WORD.min(end - word * WORD));
            if to - from == WORD && self.words[word].bytes == 0 {
                visit(&mut self.words[word]);
            } else {
                self.part(word, from..to, &mut visit);
            }
            at = word * WORD + to;
        }
    }

    fn part(&mut self, word: usize, range: std::ops::Range<usize>, visit: &mut impl FnMut(&mut Shadow)) {
        let shadow = &mut self.words[word];
        if shadow.bytes == 0 {
            let bytes = [*shadow; WORD];
            shadow.bytes = match self.free.pop() {
                Some(place) => {
                    self.bytes[place as usize - 1] = bytes;
                    place
                }
                None => {
                    self.bytes.push(bytes);
                    self.bytes.len() as u32
                }
            };
        }
        let place = shadow.bytes;
        let bytes = &mut self.bytes[place as usize - 1];
        bytes[range].iter_mut().for_each(visit);
        if bytes[1..].iter().all(|byte| *byte == bytes[0]) {
            *shadow = bytes[0];
            self.free.push(place);
        }
    }
}

/// No one of these has raced.
#[inline(always)]
fn not_racing<const N: usize>(me: &Thread, addr: u32, does: &str, others: [(Option<u16>, &str); N]) {
    for (other, did) in others {
        if let Some(other) = other {
            race(me, addr, does, did, other);
        }
    }
}

#[cold]
fn pending(me: &Thread, addr: u32, owner: u16) -> ! {
    let what =
        format!("touches shared byte {addr} while thread {owner}'s asynchronous copy to it has not been waited for");
    me.fault(FaultKind::AsyncPending, what)
}

#[cold]
fn race(me: &Thread, addr: u32, does: &str, did: &str, other: u16) -> ! {
    let who = match other {
        MANY => "several threads".to_string(),
        copy if is_copy(copy) => "a bulk copy".to_string(),
        thread => format!("thread {thread}"),
    };
    me.fault(FaultKind::Race, format!("{does} shared byte {addr}, which {who} {did} with no barrier between"))
}
