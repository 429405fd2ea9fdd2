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
    sent: usize,
    confirmed: usize,
    exit: Option<Exit>,
    told: bool,
}

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
                let bytes = words.first().and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
                let lines = (0..).flat_map(|line: u64| format!("{line:015}\n").into_bytes());
                Self { output: lines.take(bytes).collect(), exit: Some(exit(0, 0)), ..Self::default() }
            }
            // They go on until input or a signal ends them.
            "cat" => Self { echoes: true, ..Self::default() },
            "sleep" => Self::default(),
            _ => return None,
        })
    }

    /// Follows it from this byte on.
    pub(super) fn attach(&mut self, from: u64) -> Vec<Answer> {
        let from = usize::try_from(from).unwrap_or(usize::MAX).min(self.output.len());
        (self.sent, self.confirmed, self.told) = (from, from, false);
        let mut answers = vec![Answer::Accepted(Default::default())];
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
        answers.push(Answer::Window(Window { bytes: self.taken }));
        answers
    }

    pub(super) fn hear_window(&mut self, window: Window) -> Vec<Answer> {
        let read = usize::try_from(window.bytes).unwrap_or(usize::MAX);
        self.confirmed = self.confirmed.max(read.min(self.sent));
        self.go_on()
    }

    pub(super) fn hear_signal(&mut self, number: u32) -> Vec<Answer> {
        let ended = if number == 0 { Exit { cancelled: true, ..exit(0, 15) } } else { exit(0, number) };
        self.exit.get_or_insert(ended);
        self.go_on()
    }

    /// Takes input and sends output as far as the windows let it.
    fn go_on(&mut self) -> Vec<Answer> {
        let mut answers = Vec::new();
        if self.echoes && self.output.len() - self.confirmed < WINDOW_BYTES && !self.input.is_empty() {
            self.taken += self.input.len() as u64;
            self.output.append(&mut self.input);
            answers.push(Answer::Window(Window { bytes: self.taken }));
        }
        if self.echoes && self.last && self.input.is_empty() {
            self.exit.get_or_insert(exit(0, 0));
        }
        while self.sent < self.output.len() && self.sent - self.confirmed < WINDOW_BYTES {
            let end = self.output.len().min(self.sent + CHUNK_BYTES);
            let data = self.output[self.sent..end].to_vec();
            answers.push(Answer::Output(Output { stderr: false, data, offset: self.sent as u64, lost: 0 }));
            self.sent = end;
        }
        if let Some(exit) = self.exit.filter(|_| self.sent == self.output.len() && !self.told) {
            self.told = true;
            answers.push(Answer::Exit(exit));
        }
        answers
    }
}
