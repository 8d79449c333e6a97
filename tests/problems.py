"""What users of quantization tools suffer, and which tests show that it does not happen here.

`PROBLEMS` maps the problem's number to its name and its tests, `LATER` to what is missing before it can be tested.
`CASES` maps conformance cases to tests; those of a file named after their theme are not repeated in others.
"""

PROBLEMS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "tracing dies on control flow, loops and argument lists",
        (
            "test_problems_capture.py::test_control_flow_on_data_is_refused_with_the_line_of_the_model",
            "test_problems_capture.py::test_loops_over_sizes_and_lists_of_arguments_are_no_obstacle",
            "test_capture.py::test_variadic_and_nested_arguments",
        ),
    ),
    2: (
        "conditions on data, some of them the observers' own",
        (
            "test_problems_capture.py::test_control_flow_on_data_is_refused_with_the_line_of_the_model",
            "test_problems_capture.py::test_loops_over_sizes_and_lists_of_arguments_are_no_obstacle",
            "test_problems_capture.py::test_observing_adds_no_condition_to_the_graph",
        ),
    ),
    3: (
        "models have to be rewritten: functions, reused modules, unrolled loops",
        (
            "test_problems_capture.py::test_one_linear_called_in_an_unrolled_loop_is_one_weight_and_a_range_per_call",
            "test_problems_capture.py::test_functions_need_no_modules",
            "test_lower.py::test_case_28_frontend_a13_a_module_called_twice_has_a_range_per_call",
            "test_lower.py::test_backend_9_frontend_b22_a_shared_weight_is_stored_once",
        ),
    ),
    4: (
        "nothing is quantized, and nothing says so",
        (
            "test_recipe.py::test_frontend_a18_nothing_to_quantize_is_an_error_with_reasons",
            "test_problems_capture.py::test_a_mode_inside_forward_hides_no_operator",
            "test_model.py::test_a_share_in_int8_can_be_demanded",
        ),
    ),
    5: (
        "an operator without a quantized kernel is an error that names no module",
        (
            "test_problems_silence.py::test_an_operator_without_a_kernel_is_named_with_module_operator_and_line",
            "test_problems_silence.py::test_every_float_part_has_a_reason_also_where_it_makes_no_floats",
            "test_model.py::test_float_parts_run_and_are_reported_with_reasons",
        ),
    ),
    6: (
        "batches that are dictionaries, have labels or several inputs",
        (
            "test_calling.py::test_problem_6_batches_of_any_mapping_with_labels_and_names_the_model_does_not_take",
            "test_calling.py::test_the_label_of_a_pair_is_never_an_optional_keyword",
            "test_calibrate.py::test_data_in_any_form_gives_the_same_ranges",
            "test_calibrate.py::test_items_for_a_model_of_two_inputs",
        ),
    ),
    7: (
        "detection and segmentation models",
        ("test_calling.py::test_problem_7_a_submodule_is_quantized_and_put_back_into_its_float_parent",),
    ),
    8: (
        "train and eval are baked in, or raise",
        (
            "test_problems_capture.py::test_a_model_in_training_mode_is_quantized_as_in_evaluation_and_left_in_training",
            "test_cases_frontends.py::test_frontend_b24_modes_of_what_came_out_do_nothing_or_say_so",
            "test_calling.py::test_the_parent_of_an_int8_part_switches_modes_moves_and_copies",
        ),
    ),
    9: (
        "batch norms that are not folded",
        (
            "test_passes.py::test_folded",
            "test_passes.py::test_a_norm_that_stays_is_skipped_with_the_reason",
            "test_pairs.py::test_operators_of_several_activations",
        ),
    ),
    10: (
        "a large drop in accuracy, and no clue which layer",
        ("test_problems_accuracy.py::test_a_bad_layer_is_found_as_the_worst",),
    ),
    11: (
        "detection heads collapse",
        ("test_problems_accuracy.py::test_operands_of_very_different_ranges_in_one_concatenation_are_named",),
    ),
    13: (
        "masks, zeros and constants break observers",
        (
            "test_problems_accuracy.py::test_a_float_minimum_used_as_a_mask_is_seen_in_the_report",
            "test_calibrate.py::test_frontend_a19_cases_12_13_nan_and_infinities_name_site_batch_and_count",
            "test_convert.py::test_frontend_a19_cases_1_4_5_6_19_constant_inputs",
            "test_convert.py::test_frontend_a19_case_17_tiny_ranges_have_a_finite_reciprocal",
        ),
    ),
    14: (
        "another CPU gives another answer",
        (
            "test_cases_backend.py::test_backend_27_extreme_weights_and_inputs_are_exact_on_every_instruction_set",
            "test_tiles.py::test_accumulators_at_their_extremes_do_not_saturate",
            "test_program.py::test_a_program_has_the_bits_of_the_interpreter",
            "test_files.py::test_another_instruction_set_gives_the_same_bits",
        ),
    ),
    15: (
        "a result depends on the rest of the batch",
        ("test_model.py::test_frontend_b23_one_program_for_every_batch",),
    ),
    16: (
        "what is deployed is not what was simulated",
        (
            "test_regions.py::test_every_net_is_within_a_level_region_by_region_and_as_a_whole",
            "test_program.py::test_a_program_has_the_bits_of_the_interpreter",
        ),
    ),
    17: (
        "an analysis that compares different data",
        ("test_problems_accuracy.py::test_both_sides_see_the_same_batches_whatever_the_loader_does",),
    ),
    18: (
        "calibration forgotten or too short: garbage without an error",
        (
            "test_problems_silence.py::test_an_uncalibrated_model_is_an_error_not_garbage",
            "test_problems_silence.py::test_less_data_than_asked_for_is_said_with_both_numbers",
            "test_calibrate.py::test_case_10_data_that_cannot_be_used_is_named_and_changes_nothing",
        ),
    ),
    19: (
        "int8 slower than float: what can be checked without a clock",
        (
            "test_problems_silence.py::test_a_float_layer_in_the_middle_costs_one_border_each_way_and_is_listed",
            "test_cli.py::test_a_ratio_needs_a_difference_larger_than_the_spread",
        ),
    ),
    20: (
        "float in silence, for want of a flag",
        (
            "test_problems_silence.py::test_modes_and_environment_do_not_decide_what_runs_in_int8",
            "test_model.py::test_a_share_in_int8_can_be_demanded",
        ),
    ),
    21: (
        "the simulation is taken for the fast model",
        ("test_problems_silence.py::test_the_simulation_and_the_program_are_different_types_and_say_what_they_are",),
    ),
    22: (
        "the CPU lacks the instructions, and nothing says so",
        (
            "test_cli.py::test_doctor_measures_and_explains",
            "test_cli.py::test_a_machine_without_vector_units_measures_memory_only",
        ),
    ),
    23: (
        "unfair benchmarks, trouble with threads",
        (
            "test_cli.py::test_bench_times_engines_by_turns_and_names_absent_ones",
            "test_model.py::test_the_number_of_threads_may_change_between_calls_and_exceed_the_cores",
        ),
    ),
    24: (
        "the choice of types decides the speed",
        ("test_problems_silence.py::test_choices_of_accuracy_add_no_operator_to_the_program",),
    ),
    25: (
        "no requantization: float between the layers",
        (
            "test_problems_silence.py::test_levels_go_from_layer_to_layer_without_float_between",
            "test_lower.py::test_backend_7_a_chain_of_linears_stays_in_integers",
            "test_cases_backend.py::test_backend_15_nothing_stands_around_a_concatenation_of_equal_scales",
        ),
    ),
    26: (
        "compile time and cold start",
        (
            "test_model.py::test_a_program_in_the_cache_is_not_compiled_again",
            "test_problems_files.py::test_importing_compiles_nothing_and_needs_no_compiler",
        ),
    ),
    28: (
        "the batch is frozen",
        (
            "test_model.py::test_frontend_b23_one_program_for_every_batch",
            "test_capture.py::test_every_net_has_a_free_batch_though_its_example_has_batch_1",
            "test_calling.py::test_keyword_arguments_behind_kwargs_keep_the_batch_free",
        ),
    ),
    29: (
        "shape inference as a step of its own that fails",
        (
            "test_calibrate.py::test_the_first_item_can_be_looked_at_before_the_model_is_captured",
            "test_capture.py::test_backend_39_a_size_read_for_a_view_keeps_the_batch_free",
        ),
    ),
    30: (
        "no saving, loading, pickling or copying",
        (
            "test_files.py::test_a_fresh_process_loads_without_the_model_s_class",
            "test_model.py::test_a_copy_computes_the_same",
            "test_problems_files.py::test_torch_save_keeps_a_model_as_any_module",
            "test_cases_frontends.py::test_frontend_a12_a_fresh_model_with_recipe_and_ranges_from_files_is_the_original",
        ),
    ),
    31: ("the file is not smaller", ("test_problems_files.py::test_a_file_is_about_a_quarter_of_the_float_weights",)),
    33: (
        "no compiler where the model runs",
        (
            "test_files.py::test_a_trusted_library_is_used_and_needs_no_compiler",
            "test_model.py::test_a_missing_compiler_is_an_error_that_says_so",
        ),
    ),
    34: ("loading takes longer than quantizing", ("test_problems_files.py::test_loading_quantizes_nothing_again",)),
    35: (
        "lists of layers to skip that silently do something else",
        (
            "test_problems_selectors.py::test_every_name_of_named_modules_is_a_selector_of_what_is_in_it",
            "test_problems_selectors.py::test_what_is_skipped_computes_with_its_float_weights",
            "test_problems_selectors.py::test_a_selector_that_misses_is_answered_with_one_that_hits",
            "test_problems_selectors.py::test_skip_stays_float_and_only_leaves_the_rest_float",
            "test_problems_selectors.py::test_a_selector_is_checked_before_any_data_is_read",
            "test_recipe.py::test_a_selector_that_matches_nothing_names_the_nearest",
            "test_cli.py::test_match_lists_what_a_selector_selects",
        ),
    ),
    36: (
        "tell me what to exclude",
        (
            "test_problems_accuracy.py::test_the_path_of_the_worst_layer_can_be_pasted_into_skip",
            "test_problems_accuracy.py::test_the_list_to_exclude_can_be_pasted_into_skip",
        ),
    ),
    38: (
        "debugging tools that are scripts, or missing",
        (
            "test_problems_accuracy.py::test_a_bad_layer_is_found_as_the_worst",
            "test_problems_accuracy.py::test_the_table_has_the_worst_on_top_and_the_result_in_the_first_line",
            "test_problems_accuracy.py::test_the_program_itself_is_compared_operator_by_operator",
            "test_problems_accuracy.py::test_a_program_with_other_numbers_in_it_is_compared_by_its_results",
        ),
    ),
    39: (
        "locked versions, heavy dependencies, memory that grows with the data",
        (
            "test_problems_files.py::test_dependencies_are_few_and_have_no_upper_bound",
            "test_problems_files.py::test_importing_compiles_nothing_and_needs_no_compiler",
            "test_problems_files.py::test_statistics_have_one_size_however_much_data_they_saw",
        ),
    ),
    40: (
        "noise, stale documentation",
        (
            "test_problems_silence.py::test_the_whole_way_prints_nothing_and_warns_of_nothing",
            "test_readme.py::test_python_blocks_run_and_print_what_the_page_says",
        ),
    ),
}

LATER = {
    12: "layer norm, softmax and attention stay in float",
    27: "speed over releases needs a machine of its own; texts of every stage are golden",
    32: "there is no ONNX export",
    37: "there is no search",
}
"""Problem -> what is missing."""

CASES: dict[str, tuple[str, ...]] = {
    "frontends A9": (
        "test_pairs.py::test_a_concatenation_shares_one_site_and_sees_all_its_operands",
        "test_pairs.py::test_operators_of_several_activations",
        "test_cases_frontends.py::test_frontend_a9_a_concatenation_of_a_single_tensor_then_a_pool_shares_all_the_way",
    ),
    "frontends A12": (
        "test_cases_frontends.py::test_frontend_a12_a_fresh_model_with_recipe_and_ranges_from_files_is_the_original",
        "test_files.py::test_a_loaded_model_is_the_saved_one",
    ),
    "frontends A14": ("test_cases_frontends.py::test_frontend_a14_a_small_mobilenet_is_int8_throughout_and_agrees",),
    "frontends B11": (
        "test_cases_frontends.py::test_frontend_b11_a_copy_of_a_stage_is_independent",
        "test_cases_frontends.py::test_frontend_b11_what_can_be_pickled_is_and_the_rest_says_what_to_save",
        "test_model.py::test_a_copy_computes_the_same",
    ),
    "frontends B12": (
        "test_problems_accuracy.py::test_a_bad_layer_is_found_as_the_worst",
        "test_problems_accuracy.py::test_what_a_row_says_alone_is_exact_where_nothing_is_rounded",
        "test_problems_accuracy.py::test_so_far_at_the_last_operator_is_the_result",
        "test_problems_accuracy.py::test_rows_are_keyed_by_names_that_are_the_same_every_time",
        "test_problems_accuracy.py::test_a_reference_of_another_model_is_refused_by_operator_and_shape",
    ),
    "frontends B24": (
        "test_cases_frontends.py::test_frontend_b24_modes_of_what_came_out_do_nothing_or_say_so",
        "test_cases_frontends.py::test_frontend_b24_the_float_model_keeps_the_mode_it_had",
        "test_model.py::test_training_mode_is_refused_with_a_warning",
        "test_training.py::test_frontend_b24_train_and_eval_do_what_they_say",
    ),
    "backend 15": ("test_cases_backend.py::test_backend_15_nothing_stands_around_a_concatenation_of_equal_scales",),
    "backend 16": (
        "test_cases_backend.py::test_backend_16_operands_of_other_scales_are_requantized_before_a_concatenation",
    ),
    "backend 18": (
        "test_functions.py::test_functions_between_convolutions_run_in_int8",
        "test_functions.py::test_numbers_that_change_nothing_vanish",
        "test_cases_backend.py::test_backend_18_arithmetic_with_a_neutral_number_vanishes",
        "test_cases_backend.py::test_backend_18_numbers_and_tensors_of_one_element_keep_the_element_type",
        "test_cases_backend.py::test_backend_18_a_scaled_and_masked_product_of_two_activations_is_one_partition",
    ),
    "backend 22": (
        "test_cases_backend.py::test_backend_22_a_value_that_is_returned_and_read_on_is_the_levels_the_next_layer_reads",
    ),
    "backend 23": (
        "test_cases_backend.py::test_backend_23_channels_last_input_gives_the_same_bits_and_comes_back_so",
        "test_regions.py::test_backend_23_channels_last_input",
    ),
    "backend 24": (
        "test_passes.py::test_folded",
        "test_cases_operators.py::test_backend_24_a_folded_norm_equals_quantizing_the_folded_model",
    ),
    "backend 25": (
        "test_cases_operators.py::test_backend_25_every_activation_behind_every_anchor_stays_in_integers",
        "test_functions.py::test_functions_between_convolutions_run_in_int8",
        "test_regions.py::test_odd_but_legal",
    ),
    "backend 27": (
        "test_cases_backend.py::test_backend_27_extreme_weights_and_inputs_are_exact_on_every_instruction_set",
        "test_tiles.py::test_accumulators_at_their_extremes_do_not_saturate",
        "test_convert.py::test_frontend_b26_seven_bits_stay_in_0_127",
    ),
    "backend 28": (
        "test_convolutions.py::test_reference_interpreter_and_kernels_agree",
        "test_convolutions.py::test_an_accumulator_and_its_tail_are_one_partition",
    ),
    "backend 32": (
        "test_cases_backend.py::test_backend_32_weights_belong_to_the_model_that_was_made_from_them",
        "test_cases_backend.py::test_backend_32_a_second_call_packs_nothing",
        "test_cases_backend.py::test_backend_32_a_cache_without_room_gives_the_same_bits",
        "test_cases_backend.py::test_backend_32_a_cleared_cache_is_filled_again",
    ),
    "backend 33": (
        "test_cases_backend.py::test_backend_33_threads_that_compile_and_call_at_once_get_what_one_gets",
        "test_cases_backend.py::test_backend_33_one_plan_for_each_set_of_shapes_however_many_ask",
        "test_model.py::test_eight_threads_with_different_shapes_get_what_one_gets",
        "test_model.py::test_two_models_run_at_once",
        "test_native.py::test_jobs_of_several_callers_run_at_once",
    ),
    "backend 34": (
        "test_cases_backend.py::test_backend_34_another_number_of_threads_for_every_call",
        "test_model.py::test_the_number_of_threads_may_change_between_calls_and_exceed_the_cores",
        "test_threads.py::test_calls_run_on_the_number_chosen",
    ),
    "backend 40": (
        "test_cases_operators.py::test_backend_40_sums_in_every_order_with_alpha_and_with_the_operand_of_the_conv",
        "test_cases_operators.py::test_backend_40_padding_that_copies_pixels_stays_in_integers",
        "test_convert.py::test_case_34_borders_are_exact_with_every_padding_mode_and_a_zero_point",
    ),
    "calibration 11": ("test_problems_silence.py::test_less_data_than_asked_for_is_said_with_both_numbers",),
    "calibration 24": (
        "test_cases_calibration.py::test_calibration_24_values_of_other_types_are_counted_as_float32",
        "test_cases_calibration.py::test_calibration_24_a_double_model_is_not_downcast_in_silence",
        "test_calling.py::test_calibration_24_the_mode_around_the_whole_way_changes_nothing",
        "test_statistics.py::test_case_24_half_and_double_are_counted_as_float32",
    ),
    "calibration 38": ("test_cases_calibration.py::test_calibration_38_scales_per_channel_end_at_the_requantize",),
    "calibration 41": (
        "test_cases_calibration.py::test_calibration_41_a_norm_without_statistics_stays_in_float_and_is_reported",
        "test_cases_calibration.py::test_calibration_41_calibrating_changes_no_buffer_mode_generator_or_grad_mode",
        "test_problems_capture.py::test_a_model_in_training_mode_is_quantized_as_in_evaluation_and_left_in_training",
        "test_capture.py::test_case_41_the_float_model_is_the_same_afterwards_also_when_a_step_fails",
    ),
    "calibration 42": (
        "test_cases_calibration.py::test_calibration_42_a_failure_in_the_middle_leaves_what_was_there_and_can_be_resumed",
        "test_calibrate.py::test_case_42_an_exception_in_the_data_restores_what_was_there",
    ),
    "calibration 46": (
        "test_cases_calibration.py::test_calibration_46_two_runs_write_the_same_bytes",
        "test_cases_calibration.py::test_calibration_46_the_number_of_threads_changes_no_bit_of_the_statistics",
    ),
    "calibration 47": (
        "test_calibrate.py::test_case_47_ranges_survive_json_and_refuse_another_model",
        "test_cases_calibration.py::test_calibration_47_ranges_of_another_graph_list_what_is_missing",
    ),
    "calibration 48": (
        "test_calling.py::test_calibration_48_a_model_with_an_int8_part_is_not_quantized_again",
        "test_calling.py::test_calibration_48_a_step_that_is_given_another_stage_says_which_call_makes_the_right_one",
        "test_calling.py::test_calibration_48_a_graph_with_quantize_and_dequantize_in_it_is_not_quantized_again",
        "test_cases_calibration.py::test_calibration_48_calibrating_twice_adds_and_converting_twice_repeats",
    ),
}
