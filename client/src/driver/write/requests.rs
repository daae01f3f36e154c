//! Requests whose data or commits are sent together.

use harvestfs_protocol::request_id::RequestId;

/// Returns the request under whose id something is sent that several requests wait for: the first.
/// The logs of the others name it, so that they can be followed there.
pub(crate) fn carrier(requests: impl Iterator<Item = RequestId>) -> RequestId {
    let mut requests = requests.filter(|request| request.is_some());
    let Some(first) = requests.next() else {
        return RequestId::NONE;
    };
    let mut logged = first;
    for other in requests {
        if other != logged {
            logged = other;
            other.during(|| tracing::debug!(carrier = %first, "goes out with another request"));
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_carries_the_others() {
        let (first, second) = (RequestId::random(), RequestId::random());
        let none = RequestId::NONE;
        assert_eq!(carrier([none, first, first, second].into_iter()), first);
        assert_eq!(carrier([none, none].into_iter()), none);
        assert_eq!(carrier(std::iter::empty()), none);
    }
}
