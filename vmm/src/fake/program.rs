//! A program that a guest runs: its input, its output by offset, and its end, for those that follow it and attach to it.

use mvm_proto::guest::{CHUNK_BYTES, Exec, Exit, Input, Output, WINDOW_BYTES, Window, guest_frame};

type Answer = guest_frame::Body;

/// All that it wrote is kept: tests are short.
#[derive(Debug, Default)]
pub(super) struct Program {
    /// What comes in goes out.
    echoes: bool,
    input: Vec<u8>,
    taken: u64,
    last: bool,
    output: Vec<u8>,
    /// In place of `output`: so many bytes of numbered lines, made when they are sent.
    flood: u64,
    sent: u64,
    confirmed: u64,
    /// Its end alone is asked for.
    let_go: bool,
    exit: Option<Exit>,
    told: bool,
}

/// Of a numbered line, its end included.
const LINE_BYTES: u64 = 16;

fn exit(code: i32, signal: u32) -> Exit {
    Exit { code, signal, timed_out: false, cancelled: false }
}

impl Program {
    /// The programs that there are; none of another name.
    pub(super) fn start(exec: &Exec, hostname: &str) -> Option<Self> {
        let words = exec.command.get(1..).unwrap_or_default();
        let said =
            |text: String| Self { output: text.into_bytes(), exit: Some(exit(0, 0)), ..Self::default() };
        Some(match exec.command.first()?.as_str() {
            "echo" => said(words.join(" ") + "\n"),
            "uname" => said(format!("Linux {hostname} 0.0.0-fake x86_64 GNU/Linux\n")),
            "true" | "exit" => said(String::new()),
            "false" => Self { exit: Some(exit(1, 0)), ..Self::default() },
            // So many bytes of numbered lines.
            "flood" => {
                let flood = words.first().and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
                Self { flood, exit: Some(exit(0, 0)), ..Self::default() }
            }
            // They go on until input or a signal ends them.
            "cat" => Self { echoes: true, ..Self::default() },
            "sleep" => Self::default(),
            _ => return None,
        })
    }

    /// Follows it from this byte on.
    pub(super) fn attach(&mut self, exec: &Exec) -> Vec<Answer> {
        let from = exec.output_from.min(self.end());
        (self.sent, self.confirmed, self.told, self.let_go) = (from, from, false, false);
        let mut answers = vec![Answer::Accepted(Default::default())];
        answers.extend(exec.tell_input.then(|| self.window()));
        answers.extend(self.go_on());
        answers
    }

    pub(super) fn hear_input(&mut self, input: &Input) -> Vec<Answer> {
        let received = self.taken + self.input.len() as u64;
        if let Some(known) = received.checked_sub(input.offset).and_then(|known| usize::try_from(known).ok())
        {
            self.input.extend(input.data.get(known..).unwrap_or_default());
            self.last |= input.last;
        }
        let mut answers = self.go_on();
        answers.push(self.window());
        answers
    }

    pub(super) fn hear_window(&mut self, window: Window) -> Vec<Answer> {
        self.confirmed = self.confirmed.max(window.bytes.min(self.sent));
        self.go_on()
    }

    /// Nobody reads its output any more.
    pub(super) fn let_go(&mut self) -> Vec<Answer> {
        self.let_go = true;
        self.go_on()
    }

    fn window(&self) -> Answer {
        Answer::Window(Window { bytes: self.taken, received: self.taken + self.input.len() as u64 })
    }

    fn end(&self) -> u64 {
        self.flood.max(self.output.len() as u64)
    }

    /// Its output between two bytes.
    fn output(&self, from: u64, to: u64) -> Vec<u8> {
        if self.flood == 0 {
            let at = |byte: u64| usize::try_from(byte).unwrap_or(usize::MAX);
            return self.output[at(from)..at(to)].to_vec();
        }
        let lines = (from / LINE_BYTES..).flat_map(|line| format!("{line:015}\n").into_bytes());
        let (skipped, wanted) = (from % LINE_BYTES, to - from);
        let at = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        lines.skip(at(skipped)).take(at(wanted)).collect()
    }

    pub(super) fn hear_signal(&mut self, number: u32) -> Vec<Answer> {
        let ended = if number == 0 { Exit { cancelled: true, ..exit(0, 15) } } else { exit(0, number) };
        self.exit.get_or_insert(ended);
        self.go_on()
    }

    /// Takes input and sends output as far as the windows let it.
    fn go_on(&mut self) -> Vec<Answer> {
        let mut answers = Vec::new();
        let unread = self.output.len() as u64 - self.confirmed.min(self.output.len() as u64);
        if self.echoes && (self.let_go || unread < WINDOW_BYTES as u64) && !self.input.is_empty() {
            self.taken += self.input.len() as u64;
            self.output.append(&mut self.input);
            answers.push(self.window());
        }
        if self.echoes && self.last && self.input.is_empty() {
            self.exit.get_or_insert(exit(0, 0));
        }
        while !self.let_go && self.sent < self.end() && self.sent - self.confirmed < WINDOW_BYTES as u64 {
            let end = self.end().min(self.sent + CHUNK_BYTES as u64);
            let data = self.output(self.sent, end);
            answers.push(Answer::Output(Output { stderr: false, data, offset: self.sent, lost: 0 }));
            self.sent = end;
        }
        if let Some(exit) = self.exit.filter(|_| (self.let_go || self.sent == self.end()) && !self.told) {
            self.told = true;
            answers.push(Answer::Exit(exit));
        }
        answers
    }
}
