//! Sample values of each kind of a message, generated from nothing but the definition of its type.
//!
//! A deserializer without input: it produces numbers and texts, and for each enum chooses the variant that a script
//! demands. Messages whose fields never change get the same values from the same scripts forever.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::value::U32Deserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, Expected,
    IntoDeserializer, MapAccess, SeqAccess, VariantAccess, Visitor,
};

/// The numbers of operations to try (see `meta/operations.rs`).
const OPERATIONS_MAX: u32 = 256;

/// Returns values in which each variant of each enum within occurs at least once, with their scripts.
pub fn all<T: DeserializeOwned>() -> Vec<(Vec<u32>, T)> {
    let mut seen = BTreeSet::new();
    let mut scripts = vec![Vec::new()];
    let mut values = Vec::new();
    while let Some(script) = scripts.pop() {
        let mut sampler = Sampler::new(&script);
        let value = T::deserialize(&mut sampler);
        // The alternatives to every choice, even in a value that is impossible.
        for (at, choice) in sampler.choices.iter().enumerate() {
            let chosen = sampler.choices[..at].iter().map(|it| it.taken);
            let chosen: Vec<u32> = chosen.collect();
            for other in 0..choice.number {
                if seen.insert((choice.of.clone(), other)) {
                    scripts.push([&chosen[..], &[other]].concat());
                }
            }
        }
        if let Ok(value) = value {
            values.push((sampler.choices.iter().map(|it| it.taken).collect(), value));
        }
    }
    values.sort_by(|(a, _): &(Vec<u32>, T), (b, _)| a.cmp(b));
    values.dedup_by(|(a, _), (b, _)| a == b);
    values
}

/// Returns the value of a script.
pub fn of<T: DeserializeOwned>(script: &[u32]) -> T {
    let value = T::deserialize(&mut Sampler::new(script));
    value.unwrap_or_else(|error| panic!("{script:?}: {error}"))
}

struct Choice {
    /// The enum.
    of: String,
    /// How many variants it has.
    number: u32,
    taken: u32,
}

struct Sampler<'a> {
    script: &'a [u32],
    choices: Vec<Choice>,
    /// The last number that was handed out.
    last: u8,
    /// The next number is that of an operation.
    operation: Option<String>,
}

#[derive(Debug)]
struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl serde::de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

impl<'a> Sampler<'a> {
    fn new(script: &'a [u32]) -> Self {
        Self {
            script,
            choices: Vec::new(),
            last: 0,
            operation: None,
        }
    }

    fn choose(&mut self, of: &str, number: u32) -> u32 {
        let taken = self.script.get(self.choices.len()).copied().unwrap_or(0);
        self.choices.push(Choice {
            of: of.to_owned(),
            number,
            taken,
        });
        taken
    }

    /// Small enough for every type, and not 0, which some numbers must not be.
    fn number(&mut self) -> u8 {
        self.last = self.last % 9 + 1;
        self.last
    }

    fn text(&mut self) -> String {
        format!("n{}", self.number())
    }
}

macro_rules! numbers {
    ($($deserialize:ident $visit:ident $number:ty),*) => {
        $(fn $deserialize<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            let number = self.number();
            visitor.$visit(<$number>::from(number))
        })*
    };
}

impl<'de> Deserializer<'de> for &mut Sampler<'_> {
    type Error = Error;

    numbers!(
        deserialize_i16 visit_i16 i16, deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64, deserialize_i128 visit_i128 i128,
        deserialize_u8 visit_u8 u8, deserialize_u16 visit_u16 u16,
        deserialize_u64 visit_u64 u64, deserialize_u128 visit_u128 u128,
        deserialize_f32 visit_f32 f32, deserialize_f64 visit_f64 f64
    );

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let number = match self.operation.take() {
            Some(operations) => self.choose(&operations, OPERATIONS_MAX),
            None => self.number().into(),
        };
        visitor.visit_u32(number)
    }

    fn deserialize_i8<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let number = self.number();
        visitor.visit_i8(i8::try_from(number).map_err(Error::custom)?)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.number().is_multiple_of(2))
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_char('c')
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.text())
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.text())
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_byte_buf(self.text().into_bytes())
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_byte_buf(self.text().into_bytes())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Parts {
            sampler: self,
            left: 2,
        })
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        left: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        let expected = (&visitor as &dyn Expected).to_string();
        if expected.starts_with("the number of an operation") {
            self.operation = Some(std::any::type_name::<V::Value>().to_owned());
        }
        visitor.visit_seq(Parts {
            sampler: self,
            left,
        })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        left: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(left, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(Parts {
            sampler: self,
            left: 2,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_seq(Parts {
            sampler: self,
            left: fields.len(),
        })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let name = format!("{name} {}", std::any::type_name::<V::Value>());
        let number = u32::try_from(variants.len()).map_err(Error::custom)?;
        let variant = self.choose(&name, number);
        visitor.visit_enum(Variant {
            sampler: self,
            variant,
        })
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error("a type that does not say what it is".to_owned()))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

struct Parts<'s, 'a> {
    sampler: &'s mut Sampler<'a>,
    left: usize,
}

impl<'de> SeqAccess<'de> for Parts<'_, '_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(&mut *self.sampler).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> MapAccess<'de> for Parts<'_, '_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        self.next_element_seed(seed)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        seed.deserialize(&mut *self.sampler)
    }
}

struct Variant<'s, 'a> {
    sampler: &'s mut Sampler<'a>,
    variant: u32,
}

impl<'de> EnumAccess<'de> for Variant<'_, '_> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Error> {
        let variant: U32Deserializer<Error> = self.variant.into_deserializer();
        Ok((seed.deserialize(variant)?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_, '_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(&mut *self.sampler)
    }

    fn tuple_variant<V: Visitor<'de>>(self, left: usize, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Parts {
            sampler: self.sampler,
            left,
        })
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_seq(Parts {
            sampler: self.sampler,
            left: fields.len(),
        })
    }
}

#[test]
fn each_variant_of_each_enum_is_made() {
    use crate::meta::{Housekeeping, Mutation, Query};
    use crate::rpc::Request;

    let requests = all::<Request>();
    let names: BTreeSet<&str> = requests
        .iter()
        .filter_map(|(_, request)| match request {
            Request::Meta(call) => Some(call.op.name()),
            _ => None,
        })
        .collect();
    let all_names = [Query::NAMES, Mutation::NAMES, Housekeeping::NAMES].concat();
    assert_eq!(names, all_names.into_iter().collect());
    for (script, request) in &requests {
        assert_eq!(of::<Request>(script), *request, "{script:?}");
    }
    let errors = all::<crate::error::FsError>();
    assert!(errors.len() >= 31, "{errors:?}");
}
