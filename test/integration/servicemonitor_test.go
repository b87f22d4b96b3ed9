// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// The ServiceMonitor leads to the agents' pods, by the Service, and asks for paths that the readers' role has.
func TestTheServiceMonitorLeadsToTheAgents(t *testing.T) {
	t.Parallel()
	var monitor struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			Selector  metav1.LabelSelector
			Endpoints []struct {
				Port, Path, Scheme, Interval, ScrapeTimeout, BearerTokenFile string
				HonorLabels                                                  bool
				TLSConfig                                                    struct{ InsecureSkipVerify bool }
			}
		}
	}
	var service v1.Service
	var agent appsv1.DaemonSet
	var reader rbacv1.ClusterRole
	for path, into := range map[string]any{
		"monitoring/servicemonitor.yaml": &monitor, "base/node-agent/service.yaml": &service,
		"base/node-agent/daemonset.yaml": &agent, "base/access/metrics-reader.yaml": &reader,
	} {
		content, err := os.ReadFile(filepath.Join(manifests, path))
		if err == nil {
			err = yaml.UnmarshalStrict(content, into)
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	selector, err := metav1.LabelSelectorAsSelector(&monitor.Spec.Selector)
	if err != nil || !selector.Matches(labels.Set(service.Labels)) || monitor.Namespace != service.Namespace {
		t.Errorf("the Service has labels %v and is not selected by %v, %v", service.Labels, selector, err)
	}
	template := agent.Spec.Template
	if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(template.Labels)) || agent.Namespace != service.Namespace {
		t.Errorf("the agents' pods have labels %v and are not selected by %v", template.Labels, service.Spec.Selector)
	}
	ports := map[string]int32{}
	for _, port := range template.Spec.Containers[0].Ports {
		ports[port.Name] = port.ContainerPort
	}
	var paths []string
	for _, endpoint := range monitor.Spec.Endpoints {
		paths = append(paths, endpoint.Path)
		if !slices.Contains(reader.Rules[0].NonResourceURLs, endpoint.Path) {
			t.Errorf("readers may not get %s", endpoint.Path)
		}
		if i := slices.IndexFunc(service.Spec.Ports, func(p v1.ServicePort) bool { return p.Name == endpoint.Port }); i < 0 {
			t.Errorf("the Service has no port %q", endpoint.Port)
		} else if port := service.Spec.Ports[i]; ports[port.TargetPort.StrVal] != port.Port {
			t.Errorf("the agents' ports are %v, and the Service's leads to %q, %d", ports, port.TargetPort.StrVal, port.Port)
		}
		// Labels of pods are those of who has the GPU.
		if endpoint.Scheme != "https" || endpoint.BearerTokenFile == "" || endpoint.HonorLabels != (endpoint.Path == "/metrics/gpus") {
			t.Errorf("endpoint %+v", endpoint)
		}
	}
	if want := []string{"/metrics", "/metrics/gpus"}; !slices.Equal(paths, want) {
		t.Errorf("paths %v, want %v", paths, want)
	}
}
