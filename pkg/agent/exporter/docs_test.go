// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// TestTheDocumentHasEachMetric, and no other: in its table, and in its queries.
func TestTheDocumentHasEachMetric(t *testing.T) {
	document, err := os.ReadFile("../../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var names, rows []string
	for _, d := range allDescs {
		names = append(names, d.name)
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `(stowage_gpu_\\w+)`").FindAllSubmatch(document, -1) {
		rows = append(rows, string(row[1]))
	}
	for _, name := range names {
		if !slices.Contains(rows, name) {
			t.Errorf("%s has no row", name)
		}
	}
	for _, named := range regexp.MustCompile(`stowage_gpu_\w+`).FindAll(document, -1) {
		if !slices.Contains(names, string(named)) {
			t.Errorf("there is no %s", named)
		}
	}
}
