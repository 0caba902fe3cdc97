//! Whether all ranks have the same settings: pairs of key and value from each rank, compared by every rank.

use std::collections::{BTreeMap, BTreeSet};

/// A key whose values are not the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differing {
    /// The key.
    pub key: String,
    /// Each value, `None` for a rank without the key, with the ranks that have it; ordered by first rank.
    pub values: Vec<(Option<String>, Vec<usize>)>,
}

/// The keys in which the ranks' pairs differ, in order. The result depends only on the pairs, so it is equal on every
/// rank.
pub(crate) fn differing(ranks: &[Vec<(String, String)>]) -> Vec<Differing> {
    let settings: Vec<BTreeMap<&str, &str>> =
        ranks.iter().map(|pairs| pairs.iter().map(|(key, value)| (&**key, &**value)).collect()).collect();
    let keys: BTreeSet<&str> = settings.iter().flat_map(|settings| settings.keys().copied()).collect();
    let mut found = Vec::new();
    for key in keys {
        let mut values: Vec<(Option<String>, Vec<usize>)> = Vec::new();
        for (rank, settings) in settings.iter().enumerate() {
            let value = settings.get(key).copied();
            match values.iter_mut().find(|(known, _)| known.as_deref() == value) {
                Some((_, ranks)) => ranks.push(rank),
                None => values.push((value.map(str::to_string), vec![rank])),
            }
        }
        if values.len() > 1 {
            found.push(Differing { key: key.to_string(), values });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_grouped_by_the_ranks_that_have_them() {
        let pairs = |list: &[(&str, &str)]| -> Vec<(String, String)> {
            list.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
        };
        let same = pairs(&[("a", "1"), ("b", "2")]);
        assert!(differing(&[same.clone(), same.clone()]).is_empty());
        let ranks = [same.clone(), pairs(&[("a", "1"), ("b", "3")]), same, pairs(&[("a", "1")])];
        let values =
            vec![(Some("2".to_string()), vec![0, 2]), (Some("3".to_string()), vec![1]), (None, vec![3])];
        assert_eq!(differing(&ranks), [Differing { key: "b".to_string(), values }]);
    }
}
