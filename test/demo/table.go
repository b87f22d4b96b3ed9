// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"stowage.dev/stowage/test/lab"
)

// wrapAt is where the two wide columns break into further lines.
const wrapAt = 52

// printTable prints the rows; it is an error if any of them is not right.
func printTable(out io.Writer, rows []lab.Row) error {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "POD\tNODE\tCLAIM\tALLOCATED\tSEEN IN CONTAINER")
	var errs []error
	for _, row := range rows {
		seen := row.Seen
		if row.Err != nil {
			seen = "MISMATCH " + seen
			errs = append(errs, fmt.Errorf("pod %s: %w", row.Pod, row.Err))
		}
		allocatedLines, seenLines := wrap(strings.Join(row.Allocated, " ")), wrap(seen)
		for i := range max(len(allocatedLines), len(seenLines)) {
			cells := []string{"", "", "", lineAt(allocatedLines, i), lineAt(seenLines, i)}
			if i == 0 {
				cells[0], cells[1], cells[2] = row.Pod, row.Node, strings.Join(row.Claims, ",")
			}
			fmt.Fprintln(w, strings.Join(cells, "\t"))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	return errors.Join(errs...)
}

func lineAt(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return ""
}

// wrap breaks a cell behind spaces and commas.
func wrap(cell string) []string {
	var lines []string
	line := ""
	for _, word := range strings.SplitAfter(strings.ReplaceAll(cell, ",", ",\x00"), " ") {
		for _, part := range strings.Split(word, "\x00") {
			if line != "" && len(line)+len(strings.TrimSpace(part)) > wrapAt {
				lines = append(lines, strings.TrimSpace(line))
				line = ""
			}
			line += part
		}
	}
	return append(lines, strings.TrimSpace(line))
}
