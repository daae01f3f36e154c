//! A macro that defines enums of numbered operations.

/// Defines an enum of operations, each a struct of the same name in the module. On the wire and in the journal,
/// an operation is its number and its fields; no number is ever used twice, in any of the enums. Each has a
/// name for metrics and logs.
macro_rules! operations {
    (
        $(#[$doc:meta])*
        $operations:ident { $($number:literal => $operation:ident $name:literal,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum $operations {
            $(
                #[doc = concat!("See [`", stringify!($operation), "`].")]
                $operation($operation),
            )*
        }

        impl $operations {
            /// The names of all of them in metrics and logs.
            pub const NAMES: &[&str] = &[$($name),*];

            /// The numbers of all of them.
            #[cfg(test)]
            pub(super) const NUMBERS: &[u32] = &[$($number),*];

            /// The position of its name in [`Self::NAMES`].
            #[must_use]
            pub fn index(&self) -> usize {
                #[derive(Clone, Copy)]
                enum Index { $($operation),* }
                let index = match self {
                    $(Self::$operation(_) => Index::$operation,)*
                };
                index as usize
            }

            /// Its name in metrics and logs.
            #[must_use]
            pub fn name(&self) -> &'static str {
                Self::NAMES[self.index()]
            }
        }

        $(
            impl $operation {
                /// Its name in metrics and logs.
                pub const NAME: &str = $name;
            }

            impl From<$operation> for $operations {
                fn from(operation: $operation) -> Self {
                    Self::$operation(operation)
                }
            }
        )*

        impl serde::Serialize for $operations {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self {
                    $(Self::$operation(operation) => {
                        let number: u32 = $number;
                        (number, operation).serialize(serializer)
                    })*
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $operations {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;

                impl<'de> serde::de::Visitor<'de> for Visitor {
                    type Value = $operations;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("the number of an operation and its fields")
                    }

                    fn visit_seq<A: serde::de::SeqAccess<'de>>(
                        self,
                        mut parts: A,
                    ) -> Result<Self::Value, A::Error> {
                        let missing = || serde::de::Error::invalid_length(0, &self);
                        let number: u32 = parts.next_element()?.ok_or_else(missing)?;
                        let operation = match number {
                            $($number => parts.next_element()?.map($operations::$operation),)*
                            unknown => {
                                let unknown = serde::de::Unexpected::Unsigned(unknown.into());
                                return Err(serde::de::Error::invalid_value(unknown, &self));
                            }
                        };
                        operation.ok_or_else(missing)
                    }
                }

                deserializer.deserialize_tuple(2, Visitor)
            }
        }
    };
}

pub(super) use operations;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::meta::{Housekeeping, Mutation, Query};

    #[test]
    fn no_number_and_no_name_is_given_twice() {
        let numbers = [Query::NUMBERS, Mutation::NUMBERS, Housekeeping::NUMBERS].concat();
        let names = [Query::NAMES, Mutation::NAMES, Housekeeping::NAMES].concat();
        assert_eq!(BTreeSet::from_iter(&numbers).len(), numbers.len());
        assert_eq!(BTreeSet::from_iter(&names).len(), names.len());
    }
}
