// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"stowage.dev/stowage/test/lab"
)

// writeConfinedAgent writes a program that is the agent with the rights that the manifests give it for simulated GPUs: the capabilities of
// the DaemonSet's securityContext and no way to get others. So all end-to-end tests show that they are enough.
func writeConfinedAgent(ctx context.Context, cluster *lab.Lab, agent, path string) error {
	rendered, err := cluster.Kubectl(ctx, "kustomize", cluster.Manifest(filepath.Join("overlays", "simulated")))
	if err != nil {
		return err
	}
	security, err := agentSecurity(rendered)
	if err != nil {
		return fmt.Errorf("overlay simulated: %w", err)
	}
	if security.Privileged == nil || *security.Privileged || security.AllowPrivilegeEscalation == nil || *security.AllowPrivilegeEscalation {
		return errors.New("overlay simulated: the node agent is privileged, or may become so")
	}
	if c := security.Capabilities; c == nil || len(c.Drop) != 1 || c.Drop[0] != "ALL" {
		return fmt.Errorf("overlay simulated: capabilities %+v: want all dropped", c)
	}
	keep := "-all"
	for _, capability := range security.Capabilities.Add {
		keep += ",+" + strings.ToLower(string(capability))
	}
	script := fmt.Sprintf("#!/bin/sh\nexec setpriv --no-new-privs --bounding-set=%s --inh-caps=%s -- '%s' \"$@\"\n", keep, keep, agent)
	return os.WriteFile(path, []byte(script), 0o755)
}

// agentSecurity finds the node agent's container in rendered manifests.
func agentSecurity(rendered string) (*corev1.SecurityContext, error) {
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(rendered), 4096)
	for {
		var daemonSet appsv1.DaemonSet
		err := decoder.Decode(&daemonSet)
		if errors.Is(err, io.EOF) {
			return nil, errors.New("there is no DaemonSet")
		}
		if err != nil {
			return nil, err
		}
		if daemonSet.Kind == "DaemonSet" {
			return daemonSet.Spec.Template.Spec.Containers[0].SecurityContext, nil
		}
	}
}
