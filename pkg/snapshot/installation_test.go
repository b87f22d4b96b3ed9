// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"strings"
	"testing"

	appsapi "k8s.io/api/apps/v1"
	authorizationapi "k8s.io/api/authorization/v1"
	coordinationapi "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/snapshot"
)

// workload is a pod template with one container and one ConfigMap.
func workload(image, config string, args ...string) v1.PodTemplateSpec {
	return v1.PodTemplateSpec{Spec: v1.PodSpec{
		Containers: []v1.Container{{Name: "main", Image: image, Command: []string{"sh"}, Args: args, Env: []v1.EnvVar{{Name: "TOKEN", Value: "hidden"}}}},
		Volumes: []v1.Volume{{Name: "config", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{
			LocalObjectReference: v1.LocalObjectReference{Name: config},
		}}}},
	}}
}

func deployment(namespace, name string, template v1.PodTemplateSpec) *appsapi.Deployment { //nolint:gocritic // it is copied anyway
	return &appsapi.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: map[string]string{
			"kubectl.kubernetes.io/last-applied-configuration": "hidden",
		}},
		Spec: appsapi.DeploymentSpec{Template: template},
	}
}

func configMap(namespace, name, lease string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: map[string]string{
		"config.yaml": "kind: KubeSchedulerConfiguration\nleaderElection:\n  resourceNamespace: leaders\n  resourceName: " + lease + "\n" +
			"extenders:\n- tlsConfig:\n    keyData: hidden\n    keyFile: k\n- tlsConfig: {keyData: \"hidden\", keyFile: k}\n",
		"password": "hidden",
	}}
}

// Of a cluster with programs of all kinds those of scheduling are taken, without what others are told, and a ConfigMap of others that may not
// be read keeps nobody from reading the schedulers'.
func TestTakeInstallation(t *testing.T) {
	client := fake.NewSimpleClientset(
		deployment("airflow", "airflow-scheduler", workload("apache/airflow", "airflow", "--password=hidden")),
		deployment("batch", "job-scheduler", workload("example.com/jobs", "jobs", "--config=/etc/jobs.yaml", "--password=hidden")),
		deployment("gpu", "gpus", workload("example.com/gpu-scheduler", "gpus", "--config", "/etc/config.yaml")),
		deployment("stowage-system", "stowage-scheduler", workload("stowage.dev/scheduler", "stowage", "--config=/etc/config.yaml", "--v=2")),
		&appsapi.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: "web", Name: "triton"},
			Spec:       appsapi.DaemonSetSpec{Template: workload("nvcr.io/nvidia/tritonserver", "triton", "--api-key=hidden")},
		},
		configMap("gpu", "gpus", "gpus"), configMap("stowage-system", "stowage", "packers"),
		&coordinationapi.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "leaders", Name: "gpus"}},
		&coordinationapi.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "leaders", Name: "packers"}},
		&coordinationapi.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "leaders", Name: "hidden"}},
	)
	client.PrependReactor("get", "configmaps", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return a.GetNamespace() == "batch", nil, apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "", nil)
	})
	client.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authorizationapi.SelfSubjectAccessReview{Status: authorizationapi.SubjectAccessReviewStatus{Allowed: true}}, nil
	})
	s := small().Snapshot()
	if err := snapshot.TakeInstallation(t.Context(), client, s); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(written(t, s)), "hidden") {
		t.Error("it has what was secret")
	}
	in := s.Installation
	if got := in.ConfigMaps[0].Data["config.yaml"]; strings.Count(got, "keyFile: k") != 2 || strings.Count(got, `keyData: ""`) != 2 {
		t.Errorf("of the extenders' keys the configuration has:\n%s", got)
	}
	if len(in.Deployments) != 3 || len(in.ConfigMaps) != 2 || len(in.Leases) != 2 || len(s.Missing) != 0 {
		t.Errorf("%d deployments, %d ConfigMaps, %d leases, missing %v", len(in.Deployments), len(in.ConfigMaps), len(in.Leases), s.Missing)
	}
	for name, want := range map[string]string{
		"job-scheduler": "--config=/etc/jobs.yaml", "gpus": "--config=/etc/config.yaml", "stowage-scheduler": "--config=/etc/config.yaml --v=2",
	} {
		for _, d := range in.Deployments {
			if got := strings.Join(d.Spec.Template.Spec.Containers[0].Args, " "); d.Name == name && got != want {
				t.Errorf("%s has arguments %q, want %q", name, got, want)
			}
		}
	}
}

// The lease of a scheduler that runs outside the cluster, with the configuration that is shipped, is found without a Deployment.
func TestTheLeaseOfASchedulerElsewhere(t *testing.T) {
	client := fake.NewSimpleClientset(&coordinationapi.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "stowage-system", Name: "stowage-scheduler"}})
	client.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authorizationapi.SelfSubjectAccessReview{}, nil
	})
	s := small().Snapshot()
	if err := snapshot.TakeInstallation(t.Context(), client, s); err != nil {
		t.Fatal(err)
	}
	if got := s.Installation.Leases; len(got) != 1 || got[0].Name != "stowage-scheduler" {
		t.Errorf("leases %v", got)
	}
}
