//! The stores under comparison, behind one interface.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{Read, Write};
use std::path::Path;

use harvestfs_namenode::journal::{Journal, JournalOptions};
use redb::{ReadableDatabase, ReadableTable};

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Size of each value in bytes; keys have 8.
pub const VALUE_BYTES: usize = 192;

/// One change of the state that the store keeps.
#[derive(Clone)]
pub enum Op {
    Put(u64, [u8; VALUE_BYTES]),
    Delete(u64),
}

/// A store of 8-byte keys and values of [`VALUE_BYTES`].
pub trait Store: Send {
    /// Applies the operations; they are durable when this returns, as far as the store knows.
    fn commit(&mut self, ops: &[Op]) -> Result<()>;

    /// Calls `visit` for each stored entry.
    fn scan(&mut self, visit: &mut dyn FnMut(u64, &[u8])) -> Result<()>;

    /// Reclaims space, if the store has a call for it.
    fn compact(&mut self) -> Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Segments,
    Fjall,
    Redb,
    Sled,
    SledAlpha,
}

impl Kind {
    pub const ALL: [Self; 5] = [
        Self::Segments,
        Self::Fjall,
        Self::Redb,
        Self::Sled,
        Self::SledAlpha,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Segments => "append-only segments",
            Self::Fjall => "fjall 3.1",
            Self::Redb => "redb 4.4",
            Self::Sled => "sled 0.34.7",
            Self::SledAlpha => "sled 1.0.0-alpha.124",
        }
    }

    /// The name on the command line of child processes.
    pub fn key(self) -> &'static str {
        match self {
            Self::Segments => "segments",
            Self::Fjall => "fjall",
            Self::Redb => "redb",
            Self::Sled => "sled",
            Self::SledAlpha => "sled-alpha",
        }
    }

    pub fn from_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.key() == key)
    }

    /// Opens the store in `dir`, creating it if necessary.
    pub fn open(self, dir: &Path) -> Result<Box<dyn Store>> {
        Ok(match self {
            Self::Segments => Box::new(Segments::open(dir)?),
            Self::Fjall => Box::new(Fjall::open(dir)?),
            Self::Redb => Box::new(Redb::open(dir)?),
            Self::Sled => Box::new(Sled::open(dir)?),
            Self::SledAlpha => Box::new(SledAlpha::open(dir)?),
        })
    }
}

/// The journal of this project, and the state that a namenode would keep in memory beside it.
struct Segments {
    journal: Journal,
    state: BTreeMap<u64, [u8; VALUE_BYTES]>,
    bytes_since_snapshot: usize,
}

/// A snapshot is taken each time the log has grown by the size of the state, but not below this.
const SNAPSHOT_EVERY_BYTES_MIN: usize = 64 * 1024 * 1024;

impl Segments {
    fn open(dir: &Path) -> Result<Self> {
        let options = JournalOptions {
            create_if_empty: true,
            ..JournalOptions::new(dir, 1)
        };
        let (journal, recovered) = Journal::open(&options)?;
        let mut state = BTreeMap::new();
        if let Some((_, mut snapshot)) = recovered.snapshot {
            let mut entry = [0; 8 + VALUE_BYTES];
            let mut left = [0; 8];
            snapshot.read_exact(&mut left)?;
            for _ in 0..u64::from_le_bytes(left) {
                snapshot.read_exact(&mut entry)?;
                apply_record(&mut state, &entry)?;
            }
        }
        for record in recovered.records {
            apply_record(&mut state, &record?.1)?;
        }
        Ok(Self {
            journal,
            state,
            bytes_since_snapshot: 0,
        })
    }
}

fn apply_record(state: &mut BTreeMap<u64, [u8; VALUE_BYTES]>, record: &[u8]) -> Result<()> {
    let (key, value) = record.split_first_chunk().ok_or("short record")?;
    let key = u64::from_le_bytes(*key);
    if value.is_empty() {
        state.remove(&key);
    } else {
        state.insert(key, value.try_into()?);
    }
    Ok(())
}

fn encode_record(op: &Op) -> Vec<u8> {
    match op {
        Op::Put(key, value) => [&key.to_le_bytes(), value.as_slice()].concat(),
        Op::Delete(key) => key.to_le_bytes().to_vec(),
    }
}

impl Store for Segments {
    fn commit(&mut self, ops: &[Op]) -> Result<()> {
        let records: Vec<_> = ops.iter().map(encode_record).collect();
        self.bytes_since_snapshot += records.iter().map(Vec::len).sum::<usize>();
        self.journal.append(&records)?;
        for op in ops {
            match op {
                Op::Put(key, value) => self.state.insert(*key, *value),
                Op::Delete(key) => self.state.remove(key),
            };
        }
        self.journal.sync()?;
        let state_bytes = self.state.len() * (8 + VALUE_BYTES);
        if self.bytes_since_snapshot >= state_bytes.max(SNAPSHOT_EVERY_BYTES_MIN) {
            self.compact()?;
        }
        Ok(())
    }

    fn scan(&mut self, visit: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        for (key, value) in &self.state {
            visit(*key, value);
        }
        Ok(())
    }

    fn compact(&mut self) -> Result<()> {
        self.bytes_since_snapshot = 0;
        let Some(plan) = self.journal.begin_snapshot(self.journal.last_lsn())? else {
            return Ok(());
        };
        let mut writer = plan.writer()?;
        writer.write_all(&(self.state.len() as u64).to_le_bytes())?;
        for (key, value) in &self.state {
            writer.write_all(&key.to_le_bytes())?;
            writer.write_all(value)?;
        }
        writer.install()?;
        match self.journal.purge(u64::MAX).removal_error {
            None => Ok(()),
            Some(e) => Err(e.into()),
        }
    }
}

struct Fjall {
    database: fjall::Database,
    keyspace: fjall::Keyspace,
}

impl Fjall {
    fn open(dir: &Path) -> Result<Self> {
        let database = fjall::Database::builder(dir).open()?;
        let keyspace = database.keyspace("records", fjall::KeyspaceCreateOptions::default)?;
        Ok(Self { database, keyspace })
    }
}

impl Store for Fjall {
    fn commit(&mut self, ops: &[Op]) -> Result<()> {
        let batch = self.database.batch();
        let mut batch = batch.durability(Some(fjall::PersistMode::SyncData));
        for op in ops {
            match op {
                Op::Put(key, value) => {
                    batch.insert(&self.keyspace, key.to_be_bytes(), value.as_slice());
                }
                Op::Delete(key) => batch.remove(&self.keyspace, key.to_be_bytes()),
            }
        }
        Ok(batch.commit()?)
    }

    fn scan(&mut self, visit: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        for entry in self.keyspace.iter() {
            let (key, value) = entry.into_inner()?;
            visit(u64::from_be_bytes((*key).try_into()?), &value);
        }
        Ok(())
    }

    fn compact(&mut self) -> Result<()> {
        self.keyspace.rotate_memtable_and_wait()?;
        Ok(self.keyspace.major_compact()?)
    }
}

struct Redb {
    database: redb::Database,
}

const TABLE: redb::TableDefinition<u64, &[u8]> = redb::TableDefinition::new("records");

impl Redb {
    fn open(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let database = redb::Database::create(dir.join("store.redb"))?;
        Ok(Self { database })
    }
}

impl Store for Redb {
    fn commit(&mut self, ops: &[Op]) -> Result<()> {
        // Durability::Immediate is the default.
        let transaction = self.database.begin_write()?;
        {
            let mut table = transaction.open_table(TABLE)?;
            for op in ops {
                match op {
                    Op::Put(key, value) => drop(table.insert(key, value.as_slice())?),
                    Op::Delete(key) => drop(table.remove(key)?),
                }
            }
        }
        Ok(transaction.commit()?)
    }

    fn scan(&mut self, visit: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        let transaction = self.database.begin_read()?;
        match transaction.open_table(TABLE) {
            Ok(table) => {
                for entry in table.iter()? {
                    let (key, value) = entry?;
                    visit(key.value(), value.value());
                }
                Ok(())
            }
            Err(redb::TableError::TableDoesNotExist(_)) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn compact(&mut self) -> Result<()> {
        self.database.compact()?;
        Ok(())
    }
}

struct Sled {
    database: sled::Db,
}

impl Sled {
    fn open(dir: &Path) -> Result<Self> {
        // Only explicit flushes, so that exactly the flush that acknowledges is measured.
        let database = sled::Config::new().path(dir).flush_every_ms(None).open()?;
        Ok(Self { database })
    }
}

impl Store for Sled {
    fn commit(&mut self, ops: &[Op]) -> Result<()> {
        let mut batch = sled::Batch::default();
        for op in ops {
            match op {
                Op::Put(key, value) => batch.insert(&key.to_be_bytes(), value.as_slice()),
                Op::Delete(key) => batch.remove(&key.to_be_bytes()),
            }
        }
        self.database.apply_batch(batch)?;
        self.database.flush()?;
        Ok(())
    }

    fn scan(&mut self, visit: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        for entry in self.database.iter() {
            let (key, value) = entry?;
            visit(u64::from_be_bytes((*key).try_into()?), &value);
        }
        Ok(())
    }

    fn compact(&mut self) -> Result<()> {
        Ok(())
    }
}

struct SledAlpha {
    database: sled_alpha::Db<1024>,
}

impl SledAlpha {
    fn open(dir: &Path) -> Result<Self> {
        let mut config = sled_alpha::Config::new().path(dir);
        config.flush_every_ms = None;
        Ok(Self {
            database: config.open()?,
        })
    }
}

impl Store for SledAlpha {
    fn commit(&mut self, ops: &[Op]) -> Result<()> {
        let mut batch = sled_alpha::Batch::default();
        for op in ops {
            match op {
                Op::Put(key, value) => batch.insert(key.to_be_bytes(), value.as_slice()),
                Op::Delete(key) => batch.remove(key.to_be_bytes()),
            }
        }
        self.database.apply_batch(batch)?;
        self.database.flush()?;
        Ok(())
    }

    fn scan(&mut self, visit: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        for entry in self.database.iter() {
            let (key, value) = entry?;
            visit(u64::from_be_bytes(key.as_ref().try_into()?), &value);
        }
        Ok(())
    }

    fn compact(&mut self) -> Result<()> {
        Ok(())
    }
}
