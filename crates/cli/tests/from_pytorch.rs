//! Pages that name tests, cases and methods: all of them must exist. docs/from-pytorch.md must list each of the 82 tests of
//! PyTorch's `test_inductor_collectives.py` once, and docs/getting-started.md all methods of `Tensor`.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const PAGE: &str = "docs/from-pytorch.md";

/// The pages whose methods must exist.
const PAGES: [&str; 6] =
    ["README.md", PAGE, "docs/terms.md", "docs/getting-started.md", "docs/compile.md", "docs/operating.md"];

/// Types of the crate `consort` whose methods the pages name. A `Mesh` is also a `Group`.
const TYPES: [&str; 12] = [
    "Mesh",
    "Group",
    "Tensor",
    "HostTensor",
    "Pending",
    "Compiled",
    "Batched",
    "Iterations",
    "Safetensors",
    "Steady",
    "Init",
    "Llama",
];

/// The functions of the module, by the names of July 2026; tables may add former names.
const FUNCTIONS: [&str; 23] = [
    "wait_tensor",
    "broadcast",
    "all_reduce",
    "all_gather_single",
    "all_gather_single_autograd",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "all_reduce_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "permute_tensor",
    "isend_inplace",
    "irecv_inplace",
    "batch_p2p_ops_inplace",
    "all_gather_tensor_inplace",
    "reduce_scatter_tensor_inplace",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "all_gather_inplace",
    "allow_inflight_collective_as_graph_input_ctx",
    "AsyncCollectiveTensor",
];

/// The tests by class, without `test_`.
const TESTS: [(&str, &str); 7] = [
    (
        "TestBucketingTrace",
        "trace_ignores_ambient_pending_unbacked_symbols
        all_gather_bucket_trace_accepts_hinted_unbacked_chunk_numel
        all_gather_bucket_trace_requires_unbacked_chunk_hint
        reduce_scatter_bucket_trace_preserves_hinted_unbacked_chunk_shapes
        replacement_updates_layout_dependent_user_metadata",
    ),
    ("TestSimpleOverlap", "preserves_fake_dep_ordering"),
    (
        "TestCollectivesMultiProc",
        "broadcast_inductor allreduce_inductor allreduce_inductor_cudagraph_trees
        coalescing_manager_reduce_overhead c10d_functional_tagged_pt2_compliant eager_allreduce_inductor_wait
        inductor_allreduce_eager_wait eager_async_allreduce_inductor_wait allreduce_input_buffer_reuse
        permute_tensor allgather_output_buffer_reuse allgather_scalar_tensor_input allgather_contiguous_input
        allgather_into_tensor_inductor reduce_scatter_tensor_inductor all_to_all_single_inductor
        all_to_all_recompute_is_always_banned all_to_all_single_inductor_split_sizes_none",
    ),
    (
        "TestCollectivesInductor",
        "inductor_single_op inductor_steal_buffer inductor_doesnt_mutate_shared
        inductor_doesnt_mutate_shared_graph_partition dynamo_trace_allreduce dynamo_trace_all_gather_tensor
        dynamo_trace_all_gather_tensor_pg dynamo_trace_reduce_scatter_tensor dynamo_trace_allgather_coalesced
        dynamo_rewrite_dist_all_gather dynamo_rewrite_dist_all_gather_args_match
        dynamo_rewrite_dist_reduce_scatter dynamo_rewrite_dist_all_gather_list dynamo_rewrite_dist_allreduce
        dynamo_rewrite_dist_all_to_all_single dynamo_rewrite_dist_allreduce_reduce_op dynamo_get_world_group
        dynamo_support_collective_op_with_async_op_False dynamo_graphbreaks_unsupported_async_op
        dynamo_pg_var backwards meta inductor_all_gather_coalesced inductor_reduce_scatter_coalesced
        reorder_peak_memory all_gather_bucket all_gather_bucket_copy_cat_fusion all_gather_bucket_path
        reduce_scatter_bucket dedup_reduce_scatter all_reduce_bucket all_gather_bucket_multidtype
        reorder_peak_memory_bucketed reorder_respects_wait_dep",
    ),
    (
        "TestSyncDecisionCrossRanks",
        "sync_decision_cross_ranks sync_decision_cross_ranks_different_inputs_skips_sync
        sync_decision_cross_ranks_different_node_order sync_decision_cross_ranks_invalid_node_error
        align_runtime_estimations_across_all_distributed_ranks all_gather_comm_analysis
        reduce_scatter_comm_analysis all_reduce_comm_analysis all_to_all_comm_analysis
        regression_use_nccl_estimate_with_gloo schedule_overlap_benchmark overlap_scheduling_device_put_sync
        benchmark_collective_with_symint_args",
    ),
    (
        "TestNodeGroupNameResolution",
        "resolve_group_name_string resolve_group_name_node ag_group_key_with_node_group_name
        rs_group_key_with_node_group_name ar_group_key_with_node_group_name",
    ),
    (
        "TestDedupReduceScatter",
        "two_duplicate_rs four_duplicate_rs no_fusion_different_rs_args no_fusion_nonlinear_reduce_op
        no_fusion_wait_has_other_users no_fusion_different_dtypes",
    ),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// All Rust sources under a folder, with their file names.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() {
            all.extend(sources(&path));
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(&path).unwrap();
            all.push((path, text));
        }
    }
    all
}

/// The code spans of a page, without its code blocks.
fn spans(text: &str) -> Vec<&str> {
    let prose = text.split("```").step_by(2);
    prose.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// The rows of the tables under a heading, as cells.
fn rows<'a>(text: &'a str, heading: &str) -> Vec<Vec<&'a str>> {
    let (_, after) = text.split_once(&format!("{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    let section = after.split("\n#").next().unwrap();
    let lines = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
    lines.skip(2).map(|line| line.split(" |").map(str::trim).collect()).collect()
}

#[test]
fn each_test_of_pytorch_is_listed_once_under_its_class() {
    let text = page(PAGE);
    let mut total = 0;
    for (class, names) in TESTS {
        let expected: Vec<String> = names.split_whitespace().map(|name| format!("`test_{name}`")).collect();
        let listed: Vec<&str> = rows(&text, &format!("### {class}")).iter().map(|row| row[0]).collect();
        assert_eq!(listed, expected, "{class}");
        total += listed.len();
    }
    assert_eq!(total, 82);
    for span in spans(&text).into_iter().filter(|span| span.starts_with("test_") && is_name(span)) {
        assert_eq!(text.matches(&format!("| `{span}` |")).count(), 1, "{span}");
    }
}

/// A row says what shows it, or that it is absent.
#[test]
fn each_row_has_a_test_or_says_why_not() {
    let text = page(PAGE);
    let headings = TESTS.iter().map(|(class, _)| format!("### {class}")).chain(["## Functions".to_string()]);
    for row in headings.flat_map(|heading| rows(&text, &heading)) {
        let shown = row.last().unwrap();
        assert!(!shown.is_empty() || row[1].starts_with("*absent*"), "{row:?}");
    }
}

#[test]
fn each_function_of_the_module_is_listed_once() {
    let text = page(PAGE);
    let rows = rows(&text, "## Functions");
    for function in FUNCTIONS {
        let own = format!("`{function}`");
        let listed = rows.iter().filter(|row| row[0] == own || row[0].starts_with(&format!("{own},")));
        assert_eq!(listed.count(), 1, "{function}");
    }
}

#[test]
fn named_tests_exist() {
    let sources = sources(&root().join("crates"));
    let text = page(PAGE);
    let (mut functions, mut cases, mut missing) = (0, 0, Vec::new());
    for span in spans(&text) {
        if let Some((stem, name)) = span.split_once(".rs::")
            && is_name(name)
        {
            functions += 1;
            let file = format!("{stem}.rs");
            // The cases of `nn.rs` may lie in the folder `nn`.
            let found = |(path, text): &(PathBuf, String)| {
                let folder = path.parent().and_then(|folder| folder.file_name());
                let is_there = path.ends_with(&file) || folder.is_some_and(|folder| folder == stem);
                is_there
                    && [format!("fn {name}("), format!("fn {name}<")].iter().any(|own| text.contains(own))
            };
            if !sources.iter().any(found) {
                missing.push(span);
            }
        } else if span.ends_with(".csr") && !span.contains("..") {
            cases += 1;
            if !root().join("filetests").join(span).is_file() {
                missing.push(span);
            }
        }
    }
    assert!(missing.is_empty(), "{PAGE}: {missing:?}");
    assert!(functions > 70 && cases > 12, "{functions} functions, {cases} cases");
}

/// The public methods of each type of the crate `consort`, those that macros declare included.
fn methods() -> BTreeMap<String, BTreeSet<String>> {
    let mut methods: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (_, text) in sources(&root().join("crates/consort/src")) {
        let mut of = String::new();
        let mut in_macro = false;
        for line in text.lines() {
            let word = |text: &str| -> String {
                text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
            };
            // `impl Group {`, `impl<'a> Batched<'a> {`
            if let Some(rest) = line.strip_prefix("impl") {
                let rest =
                    if rest.starts_with('<') { rest.split_once("> ").map_or("", |(_, r)| r) } else { rest };
                (of, in_macro) = (word(rest.trim_start()), false);
            }
            match line.strip_suffix("! {") {
                Some("collectives") => (of, in_macro) = ("Group".to_string(), true),
                Some("unary" | "binary" | "reductions") => (of, in_macro) = ("Tensor".to_string(), true),
                _ => {}
            }
            let line = line.trim_start();
            if let Some(rest) = line.strip_prefix("pub fn ") {
                let name = word(rest);
                methods.entry(of.clone()).or_default().extend(Some(name).filter(|name| !name.is_empty()));
            } else if in_macro && !line.starts_with(['/', '#']) {
                // `all_reduce (group; ..`, `neg neg_ Neg, ..`
                let names = line.split([' ', ',']).filter(|name| !name.is_empty());
                let names = names.take_while(|name| is_name(name) && !name.starts_with(char::is_uppercase));
                let names = names.filter(|name| *name != "none");
                methods.entry(of.clone()).or_default().extend(names.map(str::to_string));
            }
        }
    }
    methods
}

#[test]
fn named_methods_exist() {
    let methods = methods();
    let has = |of: &str, name: &str| methods.get(of).is_some_and(|names| names.contains(name));
    let (mut seen, mut missing) = (0, Vec::new());
    for (page, text) in PAGES.map(|path| (path, page(path))) {
        for span in spans(&text) {
            // `consort::Init::timeout` is `Init::timeout`.
            let path = span.strip_prefix("consort::").filter(|rest| rest.contains("::")).unwrap_or(span);
            let Some((of, rest)) = path.split_once("::") else { continue };
            let name = rest.split('(').next().unwrap();
            let known = match of {
                "consort" => name == "nn" || methods.values().any(|names| names.contains(name)),
                "Mesh" => has("Mesh", name) || has("Group", name),
                _ if TYPES.contains(&of) => has(of, name),
                _ => continue,
            };
            seen += 1;
            if !known {
                missing.push(format!("{page}: {span}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
    assert!(seen > 60, "{seen}");
}

#[test]
fn methods_are_read_from_sources() {
    let methods = methods();
    let has = |of: &str, name: &str| methods[of].contains(name);
    assert!(has("Group", "all_reduce") && has("Group", "pending") && has("Group", "isend"));
    assert!(
        has("Tensor", "neg_") && has("Tensor", "add") && has("Tensor", "sum") && has("Tensor", "narrow_mut")
    );
    assert!(has("Batched", "send") && !has("Tensor", "all_reduce") && !has("Group", "group"));
}

#[test]
fn the_guide_lists_all_methods_of_tensor() {
    let text = page("docs/getting-started.md");
    let rows = rows(&text, "## The API");
    let listed: Vec<&str> = rows.iter().flat_map(|row| row[1].split('`').skip(1).step_by(2)).collect();
    let methods = &methods()["Tensor"];
    // The in-place form of a listed method is not listed again.
    let form = |name: &str| name.strip_suffix('_').is_some_and(|name| listed.contains(&name));
    let forgotten: Vec<&String> =
        methods.iter().filter(|name| !listed.contains(&name.as_str()) && !form(name)).collect();
    let unknown: Vec<&&str> = listed.iter().filter(|name| !methods.contains(**name)).collect();
    assert!(forgotten.is_empty() && unknown.is_empty(), "not listed: {forgotten:?}; unknown: {unknown:?}");
}

/// Rows of the guide whose methods compute a tensor of a tensor.
const COMPUTING: [&str; 6] = ["shape", "one operand", "two operands", "along dimensions", "lookup", "layers"];

/// Methods of these rows that a chain cannot have: `Result` has its own, or they take a list.
const UNCHAINED: [&str; 4] = ["and", "or", "concat", "stack"];

#[test]
fn a_chain_has_all_methods_that_compute() {
    let (text, source) = (page("docs/getting-started.md"), page("crates/consort/src/chain.rs"));
    let table =
        source.split("    chain! {\n").nth(1).and_then(|rest| rest.split("\n    }\n").next()).unwrap();
    // `[..] (..) -> Tensor: add sub;`, on one line or several.
    let names = |row: &str| -> Vec<String> {
        let names = row.rsplit(": ").next().unwrap_or_default().split_whitespace();
        names.map(str::to_string).collect()
    };
    let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
    let chained: BTreeSet<String> = table.split(';').flat_map(names).collect();
    let rows = rows(&text, "## The API");
    let computing = rows.iter().filter(|row| COMPUTING.contains(&row[0]));
    let listed: Vec<&str> = computing.flat_map(|row| row[1].split('`').skip(1).step_by(2)).collect();
    let own = listed.iter().filter(|name| !name.ends_with('_') && !UNCHAINED.contains(name));
    let forgotten: Vec<&&str> = own.filter(|name| !chained.contains(**name)).collect();
    assert!(forgotten.is_empty() && listed.len() > 80, "chain.rs lacks {forgotten:?}");
}

#[test]
fn the_signatures_of_control_flow_are_those_of_the_source() {
    let (text, source) = (page("docs/compile.md"), page("crates/consort/src/control.rs"));
    let shown: Vec<&str> =
        text.split("```text\n").skip(1).filter_map(|part| part.split("\n```").next()).collect();
    let signatures: Vec<&&str> = shown.iter().filter(|block| block.starts_with("pub fn ")).collect();
    assert_eq!(signatures.len(), 3);
    for signature in signatures {
        assert!(source.contains(*signature), "control.rs does not have\n{signature}");
    }
}

/// Words that people search for; the page answers each, be it with "not yet".
#[test]
fn terms_has_the_words_that_people_search_for() {
    let words = "shard|data parallel|tensor parallel|FSDP|ZeRO|pipeline parallel|optimizer|checkpoint|GPU|CUDA|NCCL|DTensor|\
        shard_map|communicator|gradient|Python|several hosts|DDP|mixture of experts|halo exchange|DeviceMesh|process group|\
        torchrun|mpirun|psum|ppermute|MPI_Allreduce|MPI_Request|torch.compile|graph break|timeout|deadlock|NumPy|Llama";
    let text = page("docs/terms.md").to_lowercase().replace("processgroup", "process group");
    let missing: Vec<&str> = words.split('|').filter(|word| !text.contains(&word.to_lowercase())).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
