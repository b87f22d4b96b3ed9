package integration

import (
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

// metricNames are the names of the metrics that the files of the packages define, as they write them.
func metricNames(t *testing.T) map[string]bool {
	t.Helper()
	vector := regexp.MustCompile(`(?m)metrics\.New(\w+)\(&metrics\.\w+\{\n(?:\s+\w+:\s+.*\n){1,2}\s+Name:\s+"(\w+)",$`)
	described := regexp.MustCompile(`metrics\.BuildFQName\(metricsNamespace, metricsSubsystem, "(\w+)"\)|(?m)^\s+metricsSubsystem\+"_(\w+)",$`)
	names := map[string]bool{}
	for file, prefix := range map[string]string{
		"plugins/deviceclaims/metrics.go": "stowage_scheduler_", "plugins/deviceclaims/cachemetrics.go": "stowage_scheduler_",
		"plugins/rights/metrics.go": "stowage_scheduler_",
		"agent/driver/metrics.go":   "stowage_agent_", "agent/driver/claimmetrics.go": "stowage_agent_",
	} {
		content, err := os.ReadFile(filepath.Join("../../pkg", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range vector.FindAllSubmatch(content, -1) {
			name := prefix + string(match[2])
			names[name] = true
			if strings.HasPrefix(string(match[1]), "Histogram") {
				names[name+"_count"] = true
			}
		}
		for _, match := range described.FindAllSubmatch(content, -1) {
			names[prefix+string(match[1])+string(match[2])] = true
		}
	}
	return names
}
