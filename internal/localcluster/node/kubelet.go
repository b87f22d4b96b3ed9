// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/internal/localcluster"
)

// kubeletConfiguration is the node's kubelet configuration; where nothing is said, the default holds.
func (n *Node) kubeletConfiguration() *kubeletconfig.KubeletConfiguration {
	c := &kubeletconfig.KubeletConfiguration{
		TypeMeta: metav1.TypeMeta{APIVersion: kubeletconfig.SchemeGroupVersion.String(), Kind: "KubeletConfiguration"},

		Address:            "127.0.0.1",
		Port:               n.network.kubeletPort,
		HealthzBindAddress: "127.0.0.1",
		HealthzPort:        ptr.To(n.network.healthzPort),

		// What device plugins offer is told with the node's status. It is written on change only.
		NodeStatusUpdateFrequency: metav1.Duration{Duration: time.Second},
		NodeStatusReportFrequency: metav1.Duration{Duration: 5 * time.Minute},

		ContainerRuntimeEndpoint: "unix://" + containerdSocket,
		PodLogsDir:               n.layout.podLogs(),
		VolumePluginDir:          n.layout.path("volume-plugins"),

		CgroupDriver:           "cgroupfs",
		CgroupRoot:             n.cgroup,
		EnforceNodeAllocatable: []string{},
		// Refused by default since 1.35.
		FailCgroupV1: ptr.To(false),
		FailSwapOn:   ptr.To(false),
		// Fails instead of changing a kernel setting; see hideSettings.
		ProtectKernelDefaults:  true,
		MakeIPTablesUtilChains: ptr.To(false),
		OOMScoreAdj:            ptr.To[int32](0),

		// A developer's disk is fuller than a server's. 0 % is never.
		EvictionHard: map[string]string{
			"memory.available":   "50Mi",
			"nodefs.available":   "0%",
			"nodefs.inodesFree":  "0%",
			"imagefs.available":  "0%",
			"imagefs.inodesFree": "0%",
		},
		ImageGCHighThresholdPercent: ptr.To[int32](100),
		// No pod takes the machine's processes from the others.
		PodPidsLimit: ptr.To[int64](512),
	}
	c.Authentication.X509.ClientCAFile = n.cluster.ClientCAFile()
	c.Authentication.Anonymous.Enabled = ptr.To(false)
	c.Authentication.Webhook.Enabled = ptr.To(true)
	c.Authorization.Mode = kubeletconfig.KubeletAuthorizationModeWebhook
	return c
}

// startKubelet starts the kubelet and waits until it serves.
func (n *Node) startKubelet(ctx context.Context) error {
	certificate, key, err := n.cluster.ServingCertificate("kubelet-"+n.name, n.name)
	if err != nil {
		return err
	}
	configuration := n.kubeletConfiguration()
	configuration.TLSCertFile, configuration.TLSPrivateKeyFile = certificate, key
	if n.options.Kubelet != nil {
		n.options.Kubelet(configuration)
	}
	config, err := yaml.Marshal(configuration)
	if err != nil {
		return err
	}
	if err := os.WriteFile(n.layout.kubeletConfig(), config, 0o644); err != nil {
		return err
	}
	args := []string{
		"--config=" + n.layout.kubeletConfig(),
		"--kubeconfig=" + n.kubeconfig,
		"--root-dir=" + kubeletRoot,
		"--hostname-override=" + n.name,
		// The address is given from outside: the kubelet takes no loopback address from its own flags.
		"--cloud-provider=external",
	}
	if len(n.options.Labels) > 0 {
		var labels []string
		for key, value := range n.options.Labels {
			labels = append(labels, key+"="+value)
		}
		args = append(args, "--node-labels="+strings.Join(labels, ","))
	}
	path, args := n.enclosure.Wrap(n.binaries.Kubelet(), args...)
	n.kubelet, err = localcluster.StartProcess(ctx, localcluster.Command{
		Name:    n.name + "-kubelet",
		Path:    path,
		Args:    args,
		LogFile: n.LogFile("kubelet"),
		Ready:   func(ctx context.Context) error { return healthy(ctx, http.DefaultClient, n.network.healthz()) },
	})
	return err
}

const (
	// healthTimeout is short: whoever asks asks again.
	healthTimeout = 2 * time.Second
	// readTimeout is for a page of metrics on a busy machine.
	readTimeout = 30 * time.Second
)

func healthy(ctx context.Context, client *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	_, err := get(ctx, client, url)
	return err
}

// get returns what a program of the node serves; an error if it says that something is wrong.
func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, response.Status, bytes.TrimSpace(body))
	}
	return body, err
}
