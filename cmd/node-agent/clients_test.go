// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// The node's client asks as the node, the agent's as itself.
func TestClientsAskAsWhomTheySay(t *testing.T) {
	var asked []string
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Header.Get("Impersonate-User"))
		write(t, w, &corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}})
	}))
	defer api.Close()
	config := &rest.Config{Host: api.URL}
	for _, node := range []string{"node-1", "node-2"} {
		asked = nil
		clients, err := newClients(config, node)
		if err != nil {
			t.Fatal(err)
		}
		for _, client := range []kubernetes.Interface{clients.node, clients.agent} {
			if _, err := client.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{}); err != nil {
				t.Error(err)
			}
		}
		if len(asked) != 2 || asked[0] != "system:node:"+node || asked[1] != "" {
			t.Errorf("asked as %q, want as node %s and as itself", asked, node)
		}
	}
}
