// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// overlay has the GPU operator's Helm values.
var overlay = filepath.Join("..", "..", "manifests", "overlays", "gpu-operator")

// operatorValues are those of the operator's chart, by their path, with the default of a switch.
func operatorValues(t *testing.T) map[string]string {
	t.Helper()
	values := map[string]string{}
	for _, line := range recorded(t, "gpu-operator-values.txt") {
		path, value, _ := strings.Cut(line, ": ")
		values[path] = value
	}
	return values
}

func recorded(t *testing.T, file string) (lines []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		t.Fatalf("%s is empty", file)
	}
	return lines
}

// helmValues reads a file of values: by their path, as Helm sets them.
func helmValues(t *testing.T, file string) map[string]string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(overlay, file))
	if err != nil {
		t.Fatal(err)
	}
	var tree map[string]any
	if err := yaml.UnmarshalStrict(data, &tree); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	values := map[string]string{}
	var walk func(path string, value any)
	walk = func(path string, value any) {
		if below, ok := value.(map[string]any); ok {
			for key, value := range below {
				walk(strings.TrimPrefix(path+"."+key, "."), value)
			}
			return
		}
		values[path] = fmt.Sprint(value)
	}
	walk("", tree)
	return values
}

// Helm takes values that a chart does not know without a word.
func TestTheGPUOperatorsValuesAreOnesOfItsChart(t *testing.T) {
	chart := operatorValues(t)
	for _, file := range []string{"values.yaml", "values-exclusive.yaml"} {
		values := helmValues(t, file)
		if len(values) < 3 {
			t.Errorf("%s sets %v", file, values)
		}
		for _, path := range slices.Sorted(maps.Keys(values)) {
			if _, ok := chart[path]; !ok {
				t.Errorf("%s sets %s, which the chart does not have", file, path)
			}
		}
	}
}

var (
	labelOfAPart = regexp.MustCompile(`nvidia\.com/gpu\.deploy\.[a-z-]*[a-z]`)
	helmPath     = regexp.MustCompile("`([a-zA-Z]+(?:\\.[a-zA-Z]+)+)`")
)

// The page says of each of the operator's parts what the values make of it, and by which label it is paused.
func TestThePageOfTheGPUOperatorSaysWhatItsValuesDo(t *testing.T) {
	page := documents(t, filepath.Join("..", ".."))["gpu-operator.md"]
	chart, labels := operatorValues(t), recorded(t, "gpu-operator-labels.txt")
	static := maps.Clone(chart)
	maps.Copy(static, helmValues(t, "values.yaml"))
	exclusive := maps.Clone(static)
	maps.Copy(exclusive, helmValues(t, "values-exclusive.yaml"))
	word := map[string]string{"true": "on", "false": "off"}

	rows := 0
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 6 || !slices.Contains([]string{"on", "off"}, strings.TrimSpace(cells[2])) {
			continue
		}
		rows++
		part := strings.TrimSpace(cells[0])
		said := []string{strings.TrimSpace(cells[2]), strings.TrimSpace(cells[3])}
		if path := strings.Trim(cells[1], " `"); path != "" {
			if is := []string{word[static[path]], word[exclusive[path]]}; !slices.Equal(said, is) {
				t.Errorf("%s: the page says %q, by %s it is %q", part, said, path, is)
			}
		}
		if label := strings.Trim(cells[4], " `"); label != "" && !slices.Contains(labels, label) {
			t.Errorf("%s: k8s-driver-manager knows no label %s", part, label)
		}
	}
	if rows < 10 {
		t.Errorf("%d parts: this test looks at the wrong place", rows)
	}
	for _, label := range labelOfAPart.FindAllString(page, -1) {
		if !slices.Contains(labels, label) {
			t.Errorf("the page names the label %s, which k8s-driver-manager does not know", label)
		}
	}
	named := 0
	for _, match := range helmPath.FindAllStringSubmatch(page, -1) {
		if _, ok := chart[match[1]]; ok {
			named++
		} else if part, _, _ := strings.Cut(match[1], "."); slices.ContainsFunc(slices.Collect(maps.Keys(chart)), func(path string) bool {
			return strings.HasPrefix(path, part+".")
		}) {
			t.Errorf("the page names the value %s, which the chart does not have", match[1])
		}
	}
	if named < 10 {
		t.Errorf("the page names %d values: this test looks at the wrong place", named)
	}
}
