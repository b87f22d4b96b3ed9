// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// Each metric that an example alert asks for is one that a source file of ours names, with all its words, and each alert says what it is about
// and has a row in the runbook.
func TestAlertsAskForMetricsThatExist(t *testing.T) {
	t.Parallel()
	content, err := os.ReadFile(filepath.Join(manifests, "monitoring", "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.UnmarshalStrict(content, &file); err != nil {
		t.Fatal(err)
	}
	names := metricNames(t)
	runbook, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts := 0
	// refusals are the alerts about slices that the API server does not take, each with the reasons that it counts: each reason but other has one.
	var refusals []string
	reasons := regexp.MustCompile(`stowage_agent_slice_errors_total\{reason=~?"([^"]+)"\}`)
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			alerts++
			if rule.Alert == "" || rule.Labels["severity"] == "" || !strings.HasSuffix(rule.Annotations["summary"], ".") {
				t.Errorf("alert %q, labels %v, annotations %v: something is missing", rule.Alert, rule.Labels, rule.Annotations)
			}
			if !strings.Contains(string(runbook), "\n| `"+rule.Alert+"` | ") {
				t.Errorf("alert %s has no row in the runbook", rule.Alert)
			}
			if match := reasons.FindStringSubmatch(rule.Expr); match != nil {
				refusals = append(refusals, rule.Alert+": "+match[1])
			}
			asked := regexp.MustCompile(`stowage_\w+`).FindAllString(rule.Expr, -1)
			if len(asked) == 0 {
				t.Errorf("alert %s asks for nothing of ours: %s", rule.Alert, rule.Expr)
			}
			for _, metric := range asked {
				if !names[metric] {
					t.Errorf("alert %s asks for %s, which there is not", rule.Alert, metric)
				}
			}
		}
	}
	if alerts < 5 {
		t.Errorf("only %d alerts", alerts)
	}
	if want := []string{"StowageDevicesNotPublished: dropped_fields", "StowageAgentRefused: forbidden|invalid"}; !slices.Equal(refusals, want) {
		t.Errorf("alerts count slice errors with the reasons %q, want %q", refusals, want)
	}
}

// metricNames are the names of the metrics that our packages define, as their files write them, wherever a package has them.
func metricNames(t *testing.T) map[string]bool {
	t.Helper()
	constant := regexp.MustCompile(`(?m)^(?:const |\t)(metrics(?:Namespace|Subsystem)|Subsystem) += "(\w+)"$`)
	scheduler := regexp.MustCompile(`(?m)\bmetric\.(?:Gauge|Counter)(?:Vec)?\("(\w+)",$`) // by the package metric
	vector := regexp.MustCompile(`(?m)metrics\.New(\w+)\(&metrics\.\w+\{\n((?:\s+\w+:\s+.*\n){1,2})\s+Name:\s+"(\w+)",$`)
	part := regexp.MustCompile(`(?:Namespace|Subsystem):\s+(?:(metrics\w+|metric\.Subsystem)|"(\w+)"),`)
	described := regexp.MustCompile(`(?m)metrics\.BuildFQName\(metricsNamespace, metricsSubsystem, "(\w+)"\)|^\s+metricsSubsystem\+"_(\w+)",$`)
	// By folder, as constants may be in another file of the package.
	sources := map[string]string{}
	err := filepath.WalkDir("../../pkg", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		content, err := os.ReadFile(path)
		sources[filepath.Dir(path)] += string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	subsystem := constant.FindStringSubmatch(sources["../../pkg/plugins/deviceclaims/internal/metric"])[2]
	for folder, source := range sources {
		constants := map[string]string{"metric.Subsystem": subsystem}
		for _, match := range constant.FindAllStringSubmatch(source, -1) {
			constants[match[1]] = match[2]
		}
		prefix := func(parts ...string) string {
			known := slices.DeleteFunc(parts, func(part string) bool { return part == "" })
			return strings.Join(known, "_") + "_"
		}
		for _, match := range vector.FindAllStringSubmatch(source, -1) {
			var parts []string
			for _, named := range part.FindAllStringSubmatch(match[2], -1) {
				parts = append(parts, constants[named[1]]+named[2])
			}
			name := prefix(parts...) + match[3]
			if !strings.HasPrefix(name, "stowage_") {
				t.Errorf("%s defines a metric %s", folder, name)
			}
			names[name] = true
			if strings.HasPrefix(match[1], "Histogram") {
				names[name+"_count"] = true
			}
		}
		for _, match := range scheduler.FindAllStringSubmatch(source, -1) {
			names[subsystem+"_"+match[1]] = true
		}
		for _, match := range described.FindAllStringSubmatch(source, -1) {
			names[prefix(constants["metricsNamespace"], constants["metricsSubsystem"])+match[1]+match[2]] = true
		}
	}
	return names
}
