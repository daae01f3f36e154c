//! Lines of a CSV file, plain or gzip-compressed, cut into fields; one line in memory at a time.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use flate2::bufread::MultiGzDecoder;

use super::error::{TraceError, quoted};

/// Longest line in bytes. A series of three months at one sample each minute is about 900 KB.
pub const MAX_LINE_BYTES: usize = 4 << 20;

/// Buffer between the file and the lines, in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// The lines after the header of a CSV file. Fields are separated by commas and never quoted; empty lines and
/// carriage returns at the end of a line are skipped.
pub struct Rows {
    input: Box<dyn BufRead + Send>,
    file: PathBuf,
    line: u64,
    buffer: Vec<u8>,
    header: Vec<String>,
}

impl Rows {
    /// Opens a file and reads its header. Compression is detected from the content.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let open_error = |error| TraceError::Open {
            file: path.to_owned(),
            error,
        };
        let file = File::open(path).map_err(open_error)?;
        Rows::new(path, file)
    }

    /// Reads from any source; `file` is its name in errors.
    pub fn new(file: &Path, input: impl Read + Send + 'static) -> Result<Self, TraceError> {
        let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
        let read_error = |error| TraceError::Read {
            file: file.to_owned(),
            line: 1,
            error,
        };
        let gzip = input
            .fill_buf()
            .map_err(read_error)?
            .starts_with(&[0x1f, 0x8b]);
        let input: Box<dyn BufRead + Send> = if gzip {
            let unpacked = MultiGzDecoder::new(input);
            Box::new(BufReader::with_capacity(BUFFER_BYTES, unpacked))
        } else {
            Box::new(input)
        };
        let mut rows = Rows {
            input,
            file: file.to_owned(),
            line: 0,
            buffer: Vec::new(),
            header: Vec::new(),
        };
        let header = match rows.next_row()? {
            Some(row) => row.text.split(',').map(str::to_owned).collect(),
            None => return Err(rows.malformed("a header line", "")),
        };
        rows.header = header;
        Ok(rows)
    }

    /// Returns the names of the columns.
    pub fn header(&self) -> &[String] {
        &self.header
    }

    /// Returns the number of the line read last; the header is line 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// Checks that the columns are these.
    pub fn expect_columns(&self, columns: &[&str]) -> Result<(), TraceError> {
        if self.header == columns {
            return Ok(());
        }
        let expected = format!("the columns {}", columns.join(","));
        Err(self.malformed(&expected, &self.header.join(",")))
    }

    /// Returns the next line that is not empty; none at the end of the file.
    pub fn next_row(&mut self) -> Result<Option<Row<'_>>, TraceError> {
        loop {
            self.buffer.clear();
            let limit = (MAX_LINE_BYTES + 1) as u64;
            let mut limited = (&mut self.input).take(limit);
            self.line += 1;
            let read = limited.read_until(b'\n', &mut self.buffer);
            let read = read.map_err(|error| self.read_error(error))?;
            if read == 0 {
                return Ok(None);
            }
            if self.buffer.last() == Some(&b'\n') {
                self.buffer.pop();
            } else if self.buffer.len() > MAX_LINE_BYTES {
                let found = format!("{MAX_LINE_BYTES} bytes without an end of line");
                return Err(TraceError::Malformed {
                    file: self.file.clone(),
                    line: self.line,
                    expected: format!("at most {MAX_LINE_BYTES} bytes in a line"),
                    found,
                });
            }
            if self.buffer.last() == Some(&b'\r') {
                self.buffer.pop();
            }
            if !self.buffer.is_empty() {
                break;
            }
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(text) => Ok(Some(Row {
                file: &self.file,
                line: self.line,
                text,
            })),
            Err(_) => {
                let found = String::from_utf8_lossy(&self.buffer);
                Err(self.malformed("text in UTF-8", &found))
            }
        }
    }

    /// Returns an error that the line read last is wrong.
    pub fn malformed(&self, expected: &str, found: &str) -> TraceError {
        TraceError::Malformed {
            file: self.file.clone(),
            line: self.line.max(1),
            expected: expected.to_owned(),
            found: quoted(found),
        }
    }

    fn read_error(&self, error: io::Error) -> TraceError {
        TraceError::Read {
            file: self.file.clone(),
            line: self.line,
            error,
        }
    }
}

/// One line of a CSV file.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    file: &'a Path,
    line: u64,
    text: &'a str,
}

impl<'a> Row<'a> {
    /// Returns the whole line.
    pub fn text(&self) -> &'a str {
        self.text
    }

    /// Returns the number of the line; the header is line 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// Splits the line into exactly `N` fields.
    pub fn fields<const N: usize>(&self) -> Result<[&'a str; N], TraceError> {
        let mut fields = [""; N];
        let mut found = 0;
        for field in self.text.split(',') {
            if let Some(place) = fields.get_mut(found) {
                *place = field;
            }
            found += 1;
        }
        if found != N {
            return Err(self.malformed(&format!("{N} fields"), &format!("{found} fields")));
        }
        Ok(fields)
    }

    /// Parses a field; `expected` describes it: "a server number".
    pub fn parse<T: FromStr>(&self, field: &str, expected: &str) -> Result<T, TraceError> {
        field.parse().map_err(|_| self.malformed(expected, field))
    }

    /// Parses a number that is neither infinite nor NaN.
    pub fn finite(&self, field: &str, expected: &str) -> Result<f64, TraceError> {
        let number: f64 = self.parse(field, expected)?;
        if number.is_finite() {
            Ok(number)
        } else {
            Err(self.malformed(expected, field))
        }
    }

    /// Returns an error that this line is wrong.
    pub fn malformed(&self, expected: &str, found: &str) -> TraceError {
        TraceError::Malformed {
            file: self.file.to_owned(),
            line: self.line,
            expected: expected.to_owned(),
            found: quoted(found),
        }
    }
}
